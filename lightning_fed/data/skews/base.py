"""The base of feature skews, what they know of the data, and how batches of clients, sets or all data are skewed."""

import copy
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import Self

from lightning_fed.core.seeding import Purpose, numpy_generator_for
from lightning_fed.data.batch_sources import BatchSource, JoinedBatches, SetBatches, WrappedSource
from lightning_fed.data.collation import Collate
from lightning_fed.data.inspection import TARGET_NAMES
from lightning_fed.data.split import Split
from lightning_fed.errors import FederatedError

__all__ = ["DataFacts", "FeatureSkew", "Shown", "SkewedBatches", "SkewedRows", "SkewedSource"]


@dataclass(frozen=True)
class DataFacts:
    """What a skew must know of the data that it changes.

    Attributes:
        sample: The first training input, None when it is no tensor.
        num_classes: Classes of the training samples, None without class labels.
        mean: What was subtracted from the inputs, one value or one for each channel.
        std: What they were then divided by.
    """

    sample: Tensor | None
    num_classes: int | None
    mean: Sequence[float] = (0.0,)
    std: Sequence[float] = (1.0,)

    @property
    def classes(self) -> int:
        """The number of classes; only for data with class labels."""
        assert self.num_classes is not None
        return self.num_classes

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """The shape (C, H, W) of an input, None if it is no image of floating numbers."""
        if self.sample is None or self.sample.ndim != 3 or not self.sample.is_floating_point():
            return None
        channels, height, width = self.sample.shape
        return channels, height, width

    def check_images(self, skew: str, grey: bool) -> None:
        """Refuses inputs that are no (grey) images, or not in [0, 1] once normalisation is undone; names the skew."""
        if self.sample is None or self.image_shape is None or (grey and self.image_shape[0] != 1):
            got = "inputs without a shape" if self.sample is None else f"inputs of shape {tuple(self.sample.shape)}"
            what, other = ("grey images of shape (1, H, W)", "grey") if grey else ("images of shape (C, H, W)", "other")
            raise FederatedError(
                f"Expected {what} for `--data.skew {skew}`, got {got}: choose {other} data, or leave the skew out."
            )
        place = self.sample.device
        mean, std = (torch.as_tensor(values, device=place).reshape(-1, 1, 1) for values in (self.mean, self.std))
        low, high = (self.sample * std + mean).aminmax()
        # Rounding after normalising and back, of float32 or of a narrower type.
        tolerance = max(1e-4, 4 * torch.finfo(self.sample.dtype).eps)
        if not (low >= -tolerance and high <= 1 + tolerance):
            raise FederatedError(
                f"Expected the brightness of images for `--data.skew {skew}` to be in [0, 1] before normalisation, got "
                f"{low:.3g} to {high:.3g}: scale the images, or give `Datasets` the `mean` and `std` with which they "
                "were normalised."
            )


Shown: TypeAlias = tuple[Tensor, Tensor | None]  # inputs and targets that the model sees

# Random streams of Purpose.SKEW, given as ``round``: the schemes, the numbers of rows, the clients of rows.
_SCHEMES, _DRAWS, _CLIENTS = 0, 1, 2


class FeatureSkew(ABC):
    """Base of feature skews: each client shows its samples in its own scheme; one more scheme belongs to no client.

    A subclass makes one row of ``table`` for each scheme, and computes a batch from the scheme and from numbers that
    are fixed for each row of a data set. Nothing else is random, so a sample looks the same in every batch and every
    order, on every device, and no second copy of the data is kept. ``prepare`` returns the skew that does the work;
    before that the object only holds the user's options.

    Attributes:
        num_draws: Uniform numbers in [0, 1) that ``transform`` gets for each sample.
        needs_labels: Whether the scheme depends on class labels; data without them are then refused.
        num_clients: Clients; those that do not train come last. Scheme i is client i's, the last scheme is no client's.
        facts: What is known about the data.
        table: One row for each scheme, shape (num_clients + 1, ...).
    """

    num_draws: ClassVar[int] = 0
    needs_labels: ClassVar[bool] = False

    num_clients: int
    facts: DataFacts
    table: Tensor
    _seed: int

    @abstractmethod
    def make_schemes(self, generator: np.random.Generator) -> Tensor:
        """Makes ``table``; ``num_clients`` and ``facts`` are set.

        Args:
            generator: The only randomness to draw from.

        Returns:
            One row for each client and a last one for no client, shape (num_clients + 1, ...).
        """

    @abstractmethod
    def transform(self, inputs: Tensor, targets: Tensor | None, scheme: int | Tensor, draws: Tensor) -> Shown:
        """Shows samples in a scheme; must not change its arguments.

        Args:
            inputs: Inputs as the data set has them, shape (B, ...).
            targets: Targets as the data set has them, shape (B,), None for a batch of inputs alone.
            scheme: Number of the scheme of all samples, or one for each, int64 of shape (B,).
            draws: Numbers in [0, 1) that belong to the samples, shape (B, num_draws).

        Returns:
            Inputs and targets that the model sees.
        """

    def check(self, facts: DataFacts) -> None:
        """Refuses data that the skew is not made for; here, data without class labels if ``needs_labels``."""
        if self.needs_labels and facts.num_classes is None:
            raise FederatedError(
                f"Expected class labels for `--data.skew {type(self).__name__}`, whose colors depend on them, got "
                "none: give `--data.targets`, or choose another skew."
            )

    def input_shape(self, shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Returns the shape of one skewed input."""
        return shape

    def num_classes(self, num_classes: int | None) -> int | None:
        """Returns the number of classes that the model sees."""
        return num_classes

    def class_names(self, names: Sequence[str] | None) -> Sequence[str] | None:
        """Returns the names of the classes that the model sees."""
        return names

    def per_channel(self, values: Sequence[float] | None) -> Sequence[float] | None:
        """Returns the mean or standard deviation that skewed inputs are normalised with, one value for each channel."""
        return values

    def labels(self, targets: Tensor, draws: Tensor) -> Tensor:
        """Returns the labels that the model sees, shape (B,)."""
        return targets

    def prepare(self, num_clients: int, seed: int, facts: DataFacts) -> Self:
        """Makes the schemes; all that is random, also the numbers of rows, depends on the seed.

        Returns:
            A copy that is ready; ``self`` stays as it is, so that another data module can use it.
        """
        self.check(facts)
        ready = copy.copy(self)
        ready.num_clients, ready.facts, ready._seed = num_clients, facts, seed
        ready.table = ready.make_schemes(numpy_generator_for(seed, Purpose.SKEW, _SCHEMES))
        return ready

    def on(self, device: torch.device | str) -> Self:
        """Returns a copy whose tensors are on a device."""
        moved = copy.copy(self)
        vars(moved).update({name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)})
        return moved

    def draws(self, name: str, num_samples: int) -> Tensor:
        """Draws the numbers of a data set's rows, float32 in [0, 1), shape (num_samples, num_draws).

        Those of row r depend only on the seed, the set's name and r.
        """
        generator = numpy_generator_for(self._seed, Purpose.SKEW, _DRAWS, zlib.crc32(name.encode()))
        return torch.from_numpy(generator.random((num_samples, self.num_draws), dtype=np.float32))

    def clients(
        self,
        name: str,
        targets: npt.NDArray[Any] | int,
        owners: npt.NDArray[np.int64],
        owned_targets: npt.NDArray[Any] | None,
    ) -> npt.NDArray[np.int64]:
        """Gives each row of a central set a client; each class is spread over the clients as in their training samples.

        Row r gets the owner of a random training sample of the same class, so a client without the class is never
        drawn. If classes are unknown, or no client holds the class, it gets the owner of any training sample.

        Args:
            name: Name of the data set.
            targets: Its targets, shape (samples,), or its number of samples if they are unknown.
            owners: The client of each training sample that a client holds, shape (held,).
            owned_targets: The targets of the same samples, shape (held,), or None.

        Returns:
            Client ids, shape (samples,); that of row r depends only on the clients' samples, the seed, the name and r.
        """
        generator = numpy_generator_for(self._seed, Purpose.SKEW, _CLIENTS, zlib.crc32(name.encode()))
        num_samples = targets if isinstance(targets, int) else len(targets)
        chance = generator.random(num_samples)
        drawn = owners[(chance * len(owners)).astype(np.int64)]
        if isinstance(targets, int) or owned_targets is None:
            return drawn
        for label in np.unique(targets):
            rows, candidates = np.flatnonzero(targets == label), owners[owned_targets == label]
            if len(candidates):
                drawn[rows] = candidates[(chance[rows] * len(candidates)).astype(np.int64)]
        return drawn

    def apply(self, batch: Any, scheme: int | Tensor, draws: Tensor) -> Any:
        """Skews a batch: a list or tuple that starts with inputs and targets, a dict whose first entry is the inputs.

        The batch is left as it is; ``scheme`` and ``draws`` are as in ``transform``.

        Returns:
            A list for a tuple, else a batch of the same form.
        """
        if isinstance(batch, Tensor):
            return self._skewed(batch, None, scheme, draws)[0]
        if isinstance(batch, Mapping):
            entries: Any = dict(batch)
            keys = [next(iter(entries), None), next((name for name in TARGET_NAMES if name in entries), None)]
        elif isinstance(batch, (list, tuple)) and len(batch):
            entries, keys = list(batch), [0, 1 if len(batch) > 1 else None]
        else:
            entries, keys = {}, [None, None]
        inputs, targets = (None if key is None else entries[key] for key in keys)
        if not isinstance(inputs, Tensor) or not (targets is None or isinstance(targets, Tensor)):
            raise FederatedError(
                "Expected batches of `--data.skew` to be (inputs, targets, ...) or a dict that starts with the inputs, "
                f"got {type(batch).__name__}: change the data set, or leave the skew out."
            )
        entries[keys[0]], changed = self._skewed(inputs, targets, scheme, draws)
        if keys[1] is not None:
            entries[keys[1]] = changed
        return entries

    def _skewed(self, inputs: Tensor, targets: Tensor | None, scheme: int | Tensor, draws: Tensor) -> Shown:
        if targets is None and self.needs_labels:
            raise FederatedError(
                f"Expected labels beside the inputs for `--data.skew {type(self).__name__}`, whose colors depend on "
                "them, got inputs alone: change `--data.predict_dataset`."
            )
        return self.transform(inputs, targets, scheme, draws)


class SkewedRows:
    """What is fixed for each row of one data set: its scheme, and the numbers that a skew draws for it.

    Args:
        skew: A prepared skew.
        draws: The rows' numbers, shape (samples, num_draws).
        schemes: The scheme of all rows, or one for each, shape (samples,).
    """

    def __init__(self, skew: FeatureSkew, draws: Tensor, schemes: int | npt.NDArray[np.int64]) -> None:
        self._skew, self._draws = skew, draws
        self._schemes = schemes if isinstance(schemes, int) else torch.from_numpy(schemes)

    def to(self, device: torch.device | str) -> Self:
        """Moves what is needed to a device; returns itself."""
        self._skew, self._draws = self._skew.on(device), self._draws.to(device)
        if isinstance(self._schemes, Tensor):
            self._schemes = self._schemes.to(device)
        return self

    def show(self, batch: Any, rows: Tensor | slice, scheme: int | None = None) -> Any:
        """Skews a batch of some rows, int64 of shape (B,) or a slice, in their schemes or in another one."""
        schemes = self._schemes if scheme is None else scheme
        return self._skew.apply(batch, schemes if isinstance(schemes, int) else schemes[rows], self._draws[rows])

    def collate(self, collate: Collate, samples: list[Any]) -> Any:
        """Makes a skewed batch of samples that come with their row numbers, in a worker or in the main process."""
        numbers, parts = zip(*samples, strict=True)
        return self.show(collate(list(parts)), torch.tensor(numbers))


class SkewedSource(WrappedSource):
    """Clients' batches, each in the client's scheme; computed on the device of the batches."""

    def __init__(self, source: BatchSource, split: Split, rows: SkewedRows) -> None:
        super().__init__(source)
        self._rows = rows
        self._index, self._offsets = torch.from_numpy(split.index), split.offsets

    def to(self, device: torch.device | str) -> Self:
        self._rows, self._index = self._rows.to(device), self._index.to(device)
        return super().to(device)

    def batches(self, client: int, order: Tensor, seed: int, batch_size: int | None = None) -> Iterator[Any]:
        """Yields the source's batches in the client's scheme."""
        own = self._index[int(self._offsets[client]) : int(self._offsets[client + 1])]
        own, size = own.index_select(0, order.to(own.device)), batch_size or self.batch_size
        for number, batch in enumerate(self.read(client, order, seed, batch_size)):
            yield self._rows.show(batch, own[number * size : (number + 1) * size], scheme=client)

    def gather(self, rows: Tensor, *drawn: Tensor) -> Any:
        """Gathers samples of several clients at once, each in its owner's scheme; see ``TensorSource``."""
        inner: Any = self.inner
        return self._rows.show(inner.gather(rows, *drawn), self._index.index_select(0, rows))


class SkewedBatches(JoinedBatches):
    """The skewed batches of a central set, computed on their device; several views may share the batches."""

    def __init__(self, loader: SetBatches, rows: SkewedRows) -> None:
        super().__init__([loader])
        assert loader.batch_size is not None
        self.batch_size = loader.batch_size
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(super().__iter__()):
            yield self._rows.show(batch, slice(number * self.batch_size, (number + 1) * self.batch_size))

    def to(self, device: torch.device | str) -> Self:
        self._rows.to(device)
        return super().to(device)
