"""Turns stored arrays into what a model expects: floating inputs with a channel dimension, int64 labels."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lightning_fed.errors import FederatedError

__all__ = ["Layout", "as_inputs", "as_labels", "as_numbers"]

Layout: TypeAlias = Literal["auto", "NHW", "NHWC", "as_is"]

_CHANNELS = (1, 3, 4)


def as_inputs(
    array: Tensor,
    name: str,
    layout: Layout = "auto",
    scale: bool = True,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
) -> Tensor:
    """Makes inputs (x / 255 - mean) / std from a stored array of shape (N, ...), which stays as it is.

    The options are those of ``Arrays``. The layout ``auto`` changes only 8-bit images: (N, H, W), or (N, H, W, C) with
    1, 3 or 4 channels. ``name`` is the array's, for messages.

    Returns:
        float32 of shape (N, ...); int64 for integers wider than 8 bits, such as tokens, unless mean or std is given.
    """
    array = _with_channels(array, name, layout)
    normalised = mean is not None or std is not None
    scaled = scale and array.dtype == torch.uint8
    if not (normalised or array.is_floating_point() or array.dtype in (torch.uint8, torch.bool)):
        return array.to(torch.int64).contiguous()
    # Contiguous before the values grow to four bytes; a copy only if it will be written to.
    inputs = array.contiguous().to(torch.float32, copy=scaled or normalised)
    if scaled:
        inputs.div_(255)
    if mean is not None:
        inputs.sub_(_per_channel(mean, inputs, name, "mean"))
    if std is not None:
        inputs.div_(_per_channel(std, inputs, name, "std"))
    return inputs


def as_labels(array: Tensor, name: str, option: str) -> Tensor:
    """Makes class labels, int64 of shape (N,), from whole numbers, which may be floating or of shape (N, 1)."""
    flat = array.squeeze(1) if array.ndim == 2 and array.shape[1] == 1 else array
    if flat.ndim != 1:
        raise FederatedError(
            f"Expected one class label for each sample in {name}, got an array of shape {tuple(array.shape)}: store "
            f"the number of the class, change `{option}`, or set `--data.class_labels false` for other targets."
        )
    flat = flat.to(torch.float64) if flat.is_floating_point() else flat  # narrower ones cannot be compared
    labels = flat.to(torch.int64)
    wrong = (labels < 0) | (labels != flat) if flat.is_floating_point() else labels < 0
    if wrong.any():
        raise FederatedError(
            f"Expected whole numbers of at least 0 as class labels in {name}, got {flat[wrong][0].item()}: change "
            f"`{option}`, or set `--data.class_labels false` for other targets."
        )
    return labels


def as_numbers(array: Tensor) -> Tensor:
    """Makes targets other than class labels from a stored array: float32 if floating, else int64, same shape."""
    return array.to(torch.float32 if array.is_floating_point() else torch.int64).contiguous()


def _with_channels(array: Tensor, name: str, layout: Layout) -> Tensor:
    chosen = _guess(array) if layout == "auto" else layout
    if chosen == "as_is":
        return array
    if array.ndim != len(chosen):
        raise FederatedError(
            f"Expected {name} to have {len(chosen)} dimensions for `--data.layout` {layout}, got shape "
            f"{tuple(array.shape)}: set `--data.layout as_is` to leave its dimensions as they are."
        )
    return array.unsqueeze(1) if chosen == "NHW" else array.movedim(3, 1)


def _guess(array: Tensor) -> Layout:
    # Floating arrays of these shapes may also be sequences or volumes.
    if array.dtype == torch.uint8 and array.ndim == 3:
        return "NHW"
    channels_last = array.ndim == 4 and array.shape[3] in _CHANNELS and array.shape[1] not in _CHANNELS
    return "NHWC" if array.dtype == torch.uint8 and channels_last else "as_is"


def _per_channel(value: float | Sequence[float], inputs: Tensor, name: str, option: str) -> Tensor:
    """Shapes one value, or one for each channel, to go with inputs of shape (N, C, ...)."""
    values = torch.tensor(value, dtype=torch.float32)
    if values.ndim == 0:
        return values
    if inputs.ndim < 2 or len(values) != inputs.shape[1]:
        raise FederatedError(
            f"Expected `--data.{option}` to be one value, or one for each channel of {name} (shape "
            f"{tuple(inputs.shape)}, channels second), got {len(values)} values."
        )
    return values.reshape(-1, *[1] * (inputs.ndim - 2))
