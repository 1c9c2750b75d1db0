"""Colours for grey images: one affine map per sample and channel."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fed.data.skews.base import FeatureSkew
from lightning_fed.data.skews.facts import DataFacts
from lightning_fed.errors import FederatedError

__all__ = ["ColorSkew", "color_maps", "colored", "hues_to_rgb"]


class ColorSkew(FeatureSkew):
    """Base of skews that colour labelled grey images of shape (1, H, W); they become (3, H, W)."""

    needs_labels: ClassVar[bool] = True

    def check(self, facts: DataFacts) -> None:
        """Refuses data without class labels, and inputs without shape (1, H, W) or not in [0, 1]."""
        super().check(facts)
        name, shape = type(self).__name__, facts.image_shape
        if shape is None or shape[0] != 1:
            raise FederatedError(
                f"Expected grey images of shape (1, H, W) for `--data.skew {name}`, got {facts.shape}: choose grey "
                "data, or leave the skew out."
            )
        facts.check_brightness(name)

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
    return torch.cat([scale, _divide(offset, std)], dim=-1)


def colored(inputs: Tensor, maps: Tensor) -> Tensor:
    """Colours grey images.

    Args:
        inputs: Images, floating tensor of shape (B, 1, H, W).
        maps: Scales and offsets of each image, shape (B, 6).

    Returns:
        Images of shape (B, 3, H, W) and the dtype of ``inputs``.
    """
    maps = maps.to(inputs.dtype)[:, :, None, None]
    # Two operations, each rounded separately: a fused one may round differently at the end of a vector, so that the
    # last bit of a sample would depend on its place in the batch.
    return inputs.mul(maps[:, :3]).add_(maps[:, 3:])


def hues_to_rgb(hues: Tensor, circle: int) -> Tensor:
    """Returns the fully saturated colours of some hues, computed from whole numbers: the same on every device.

    Args:
        hues: Places on the colour circle, integers in [0, circle): 0 is red, circle / 3 green, 2 circle / 3 blue.
        circle: How many places there are.

    Returns:
        Colours in [0, 1] with largest channel 1 and smallest 0, shape (*hues, 3), float32.
    """
    primaries = torch.arange(0, 6 * circle, 2 * circle, device=hues.device)
    distance = hues[..., None].to(torch.int64) * 6 - primaries
    distance = (distance + 3 * circle) % (6 * circle) - 3 * circle  # in [-3, 3) circle, along it
    return _divide((2 * circle - distance.abs()).clamp(0, circle).to(torch.float32), circle)


def _divide(values: Tensor, number: float) -> Tensor:
    # CUDA multiplies by the reciprocal of a number instead of dividing by it.
    return values / torch.full((1,), number, dtype=values.dtype, device=values.device)
