"""What a feature skew must know of the data."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fed.errors import FederatedError

__all__ = ["DataFacts"]

# Rounding of float32 after normalising and back.
_TOLERANCE = 1e-4


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
    def shape(self) -> str:
        """The shape of an input in words."""
        return "inputs without a shape" if self.sample is None else f"inputs of shape {tuple(self.sample.shape)}"

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """The shape (C, H, W) of an input, None if it is no image of floating numbers."""
        if self.sample is None or self.sample.ndim != 3 or not self.sample.is_floating_point():
            return None
        channels, height, width = self.sample.shape
        return channels, height, width

    def check_brightness(self, skew: str) -> None:
        """Refuses an image that is not in [0, 1] once the normalisation is undone, naming the skew."""
        assert self.sample is not None
        place = self.sample.device
        mean, std = (torch.as_tensor(values, device=place).reshape(-1, 1, 1) for values in (self.mean, self.std))
        low, high = (self.sample * std + mean).aminmax()
        # A narrower type than float32 rounds more.
        tolerance = max(_TOLERANCE, 4 * torch.finfo(self.sample.dtype).eps)
        if not (low >= -tolerance and high <= 1 + tolerance):
            raise FederatedError(
                f"Expected the brightness of images for `--data.skew {skew}` to be in [0, 1] before normalisation, got "
                f"{low:.3g} to {high:.3g}: scale the images, or give `Datasets` the `mean` and `std` with which they "
                "were normalised."
            )
