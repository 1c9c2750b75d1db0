"""Random changes of training images, on the device, from the seed of a client's local epoch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import default_collate

from lightning_fed.core.devices import to_device
from lightning_fed.core.seeding import Purpose, seed_for
from lightning_fed.data.batch_sources import BatchSource, WrappedSource, map_inputs
from lightning_fed.errors import FederatedError, expect_count

__all__ = ["Augmentation", "AugmentedSource", "AugmentingCollate", "CropFlip", "SampleAugmentation"]


class Augmentation(ABC):
    """Base of random changes of training inputs, a whole batch at a time.

    It sees the batches of local steps only: neither evaluation nor the gradient over a client's full data is augmented.
    """

    @abstractmethod
    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """Changes the inputs of one batch.

        Args:
            inputs: What the model would get, shape (B, ...), on any device; must not be changed in place.
            generator: The only source of randomness, on the CPU, so that a run draws the same on every device.

        Returns:
            New inputs, shape (B, ...).
        """


class SampleAugmentation(Augmentation):
    """Base of augmentations that change each sample by its own random numbers, also samples of many clients at once."""

    @abstractmethod
    def draw(self, size: int, generator: torch.Generator) -> Tensor:
        """Draws the numbers of a batch: few for each sample, as those of a whole round are sent to the device.

        Args:
            size: B.
            generator: The only source of randomness, on the CPU.

        Returns:
            The numbers of each sample, shape (B, ...).
        """

    @abstractmethod
    def change(self, inputs: Tensor, draws: Tensor) -> Tensor:
        """Changes each input by its own numbers only.

        Args:
            inputs: What the model would get, shape (B, ...), of one batch or of many; must not be changed in place.
            draws: What ``draw`` returned for them, on the same device.

        Returns:
            New inputs, shape (B, ...).
        """

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        return self.change(inputs, to_device(self.draw(len(inputs), generator), inputs.device))


class CropFlip(SampleAugmentation):
    """Adds a border of zeros, crops a random window of the original size, and mirrors half of the images.

    The usual augmentation of CIFAR: C.-Y. Lee, S. Xie, P. Gallagher, Z. Zhang, Z. Tu, "Deeply-Supervised Nets", AISTATS
    2015, section 3; K. He, X. Zhang, S. Ren, J. Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, section
    4.2. As in theirs, the border is 0 after normalisation, which is the mean colour.

    Args:
        padding: Width of the border on each side, in pixels; 0 for no cropping.
        flip: Whether an image is mirrored, left to right, with probability 1/2.
    """

    def __init__(self, padding: int = 4, flip: bool = True) -> None:
        expect_count("--data.augmentation.padding", padding, least=0)
        self.padding, self.flip = padding, flip

    def draw(self, size: int, generator: torch.Generator) -> Tensor:
        """Draws the window's top and left, and whether it is mirrored, shape (B, 3)."""
        places = torch.randint(0, 2 * self.padding + 1, (2, size), generator=generator)
        flips = torch.randint(0, 2, (1, size), generator=generator) * self.flip
        return torch.cat([places, flips]).T

    def change(self, inputs: Tensor, draws: Tensor) -> Tensor:
        if inputs.ndim != 4:
            raise FederatedError(
                f"Expected images of shape (B, C, H, W) for `--data.augmentation` CropFlip, got inputs of shape "
                f"{tuple(inputs.shape)}: set `--data.augmentation null`, or choose other data."
            )
        size, channels, height, width = inputs.shape
        # The device computes the place of each pixel from three numbers per image.
        top, left, flip = draws.unsqueeze(2).unbind(1)
        columns = torch.arange(width, device=inputs.device)
        columns = left + torch.where(flip.bool(), width - 1 - columns, columns)
        rows = top + torch.arange(height, device=inputs.device)
        # Where each pixel of the window lies in a flat image with its border, shape (B, 1, H * W).
        pixels = (rows.unsqueeze(2) * (width + 2 * self.padding) + columns.unsqueeze(1)).reshape(size, 1, -1)
        padded = pad(inputs, (self.padding,) * 4).flatten(2)
        return padded.gather(2, pixels.expand(-1, channels, -1)).view(inputs.shape)


class AugmentedSource(WrappedSource):
    """Augmented batches of another source; the augmentation is the same for every kind of source.

    Attributes:
        by_sample: The augmentation if it changes each sample by itself, so that ``gather`` can mix clients; else None.
    """

    def __init__(self, source: BatchSource, augmentation: Augmentation) -> None:
        super().__init__(source)
        self.reads_are_seeded = True
        self._augmentation = augmentation
        calls = type(augmentation).__call__
        self.by_sample: Any = augmentation if calls is SampleAugmentation.__call__ else None

    @property
    def unaugmented(self) -> BatchSource:
        """The other source, for passes over a client's data without augmentation."""
        return self.inner

    def batches(self, client: int, order: Tensor, seed: int, batch_size: int | None = None) -> Iterator[Any]:
        """Yields a client's batches; the draws depend only on the seed and the batches before."""
        generator = _stream(seed)
        for batch in self.read(client, order, seed, batch_size):
            yield map_inputs(batch, lambda inputs: self._augmentation(inputs, generator))

    def plan(self, client: int, order: Tensor, seed: int) -> tuple[Tensor, ...]:
        generator = _stream(seed)
        drawn = [self.by_sample.draw(len(batch), generator) for batch in torch.split(order, self.batch_size)]
        return *super().plan(client, order, seed), torch.cat(drawn)

    def gather(self, *planned: Tensor) -> Any:
        """Gathers samples of several clients at once, each changed by its own draws; see ``TensorSource``."""
        inner: Any = self.inner
        *others, draws = planned
        return map_inputs(inner.gather(*others), lambda inputs: self.by_sample.change(inputs, draws))


def _stream(seed: int) -> torch.Generator:
    """Returns a separate random stream, as reading random samples draws from the seed's own."""
    return torch.Generator().manual_seed(seed_for(seed, Purpose.AUGMENT))


class AugmentingCollate:
    """Collates samples into an augmented batch, for a data loader, which seeds torch's global stream itself."""

    def __init__(self, augmentation: Augmentation, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self._augmentation, self._collate = augmentation, collate

    def __call__(self, samples: list[Any]) -> Any:
        generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        return map_inputs(self._collate(samples), lambda inputs: self._augmentation(inputs, generator))
