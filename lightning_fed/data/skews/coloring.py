"""Colours for grey images: one affine map per sample and channel."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fed.data.skews.base import DataFacts, FeatureSkew
from lightning_fed.errors import FederatedError

__all__ = ["ColorSkew", "color_maps", "colored", "hues_to_rgb"]

# Rounding of float32 after normalising and back.
_TOLERANCE = 1e-4


class ColorSkew(FeatureSkew):
    """Base of skews that colour labelled grey images of shape (1, H, W); they become (3, H, W)."""

    needs_labels: ClassVar[bool] = True

    def check(self, facts: DataFacts) -> None:
        """Refuses data without class labels, and data that are no grey images.

        Raises:
            FederatedError: If an input has no shape (1, H, W).
        """
        super().check(facts)
        name, shape = type(self).__name__, facts.image_shape
        if shape is None or shape[0] != 1:
            raise FederatedError(
                f"Expected grey images of shape (1, H, W) for `--data.skew {name}`, got {facts.shape}: choose grey "
                "data, or leave the skew out."
            )
        assert facts.sample is not None
        low, high = (facts.sample * facts.std[0] + facts.mean[0]).aminmax()
        if low < -_TOLERANCE or high > 1 + _TOLERANCE:
            raise FederatedError(
                f"Expected the brightness of images for `--data.skew {name}` to be in [0, 1], apart from the mean and "
                f"std that the data set states, got {low:.3g} to {high:.3g}: scale the images, or state their `mean` "
                "and `std` in `Datasets`."
            )

    def input_shape(self, shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Returns the shape of a coloured image, (3, H, W)."""
        return None if shape is None else (3, *shape[1:])

    def per_channel(self, values: Sequence[float] | None) -> Sequence[float] | None:
        """Returns the value of the grey images for each of the three channels."""
        return None if values is None else tuple(values) * 3


def color_maps(foreground: Tensor, background: Tensor | None, facts: DataFacts) -> Tensor:
    """Computes the maps that colour an image.

    With v = std x + mean in [0, 1] the brightness of a pixel, f and b the colours of foreground and background, a
    channel of the coloured image is v f + (1 - v) b, normalised by the same mean and std as the grey image was:
    ``scale x + offset`` with scale = f - b and offset = (b + (f - b) mean - mean) / std.

    Args:
        foreground: Colours in [0, 1], shape (..., 3).
        background: Colours in [0, 1] of the same shape, None for black.
        facts: Mean and std of the grey images.

    Returns:
        Scales of the three channels, then offsets, shape (..., 6).
    """
    (mean,), (std,) = facts.mean, facts.std
    scale = foreground if background is None else foreground - background
    offset = (scale - 1) * mean if background is None else scale * mean + (background - mean)
    return torch.cat([scale, offset / std], dim=-1)


def colored(inputs: Tensor, maps: Tensor) -> Tensor:
    """Colours grey images.

    Args:
        inputs: Images, floating tensor of shape (B, 1, H, W).
        maps: Scales and offsets of each image, shape (B, 6).

    Returns:
        Images of shape (B, 3, H, W) and the dtype of ``inputs``.
    """
    maps = maps.to(inputs.dtype)[:, :, None, None]
    # Two operations, each rounded by itself: one fused may round differently at the end of a vector, and a sample would
    # depend on its place in the batch by a last bit.
    return inputs.mul(maps[:, :3]).add_(maps[:, 3:])


def hues_to_rgb(hues: Tensor) -> Tensor:
    """Returns the fully saturated colours of some hues.

    Args:
        hues: Positions on the colour circle in [0, 1): 0 is red, 1/3 green, 2/3 blue.

    Returns:
        Colours in [0, 1] with largest channel 1 and smallest 0, shape (*hues, 3).
    """
    distance = hues[..., None] * 6 - torch.tensor([0.0, 2.0, 4.0], dtype=hues.dtype)
    distance = (distance + 3) % 6 - 3  # in [-3, 3), along the circle
    return (2 - distance.abs()).clamp(0, 1)
