"""Named arrays in files, read one by one with checks, and what a model expects of them: inputs and int64 labels."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_fed.core.files import open_regular
from lightning_fed.data.readers.files import found_none
from lightning_fed.errors import FederatedError

__all__ = ["ArrayFile", "Layout", "SUFFIXES", "as_inputs", "as_labels", "as_numbers"]

Layout: TypeAlias = Literal["auto", "NHW", "NHWC", "as_is"]

_CHANNELS = (1, 3, 4)

SUFFIXES = (".npz", ".npy", ".pt", ".pth")

# From this many bytes on, a file is memory-mapped: its pages are read when they are used, and can be dropped again.
_LARGE = 2**28
_MOST_NAMES = 12
_WHOLE = {getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)} | {torch.bool}
_Read: TypeAlias = Callable[[str], Any]


class ArrayFile:
    """The named arrays of a file or folder.

    The names are the keys of an .npz file or of a dict in a .pt file, "0", "1" and so on for a tuple or list in a .pt
    file, the file's own name if it holds a single array, or the names of a folder's .npy files. No code in a file is
    run.

    Attributes:
        path: The file or folder.
        names: The arrays in it.
    """

    def __init__(self, path: Path, option: str) -> None:
        self.path, self._option = path, option
        if not path.exists():
            raise found_none("the file", path, option)
        if not path.is_dir() and path.suffix not in SUFFIXES:
            raise FederatedError(
                f"Expected `{option}` to name a file that ends in {', '.join(SUFFIXES)} or a folder of .npy files, got "
                f"{path}."
            )
        with self._reading():
            self.names, self._read = _open(path)

    def read(self, name: str, option: str) -> Tensor:
        """Reads one array by its name; ``option`` has chosen it, for messages.

        Returns:
            A tensor of numbers on the CPU, of at least one dimension; a large .npy file is mapped into memory, and
            writing into the tensor does not change the file.
        """
        if name not in self.names:
            raise FederatedError(
                f"Expected an array named {name} in {self.path}, which holds {self.listing()}: set `{option}` to the "
                "name of one of these."
            )
        with self._reading():
            value = self._read(name)
        tensor = _as_tensor(value)
        if tensor is None:
            raise FederatedError(
                f"Expected {name} in {self.path} to be an array of real numbers with one row per sample, got "
                f"{_described(value)}: change `{option}`."
            )
        return tensor

    def listing(self) -> str:
        """Returns the names for a message, the first dozen if there are more."""
        more = f" and {len(self.names) - _MOST_NAMES} others" if len(self.names) > _MOST_NAMES else ""
        return (", ".join(self.names[:_MOST_NAMES]) or "no array") + more

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever the system, NumPy and torch raise on a damaged file
            why = f"as arrays ({type(error).__name__})"
            advice = "it is truncated, damaged, or holds other objects; write it again"
            if isinstance(error, OSError) and error.strerror:
                why, advice = f"({error.strerror})", "change its permissions"
            said = f"The file {self.path} cannot be read {why}: {advice}, or change `{self._option}`."
            raise FederatedError(said) from error


def _open(path: Path) -> tuple[list[str], _Read]:
    if path.is_dir():
        return sorted(file.stem for file in path.glob("*.npy")), lambda name: _load_npy(path / f"{name}.npy")
    if path.suffix == ".npz":
        with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
            return list(arrays.files), lambda name: _load_member(path, name)
    if path.suffix == ".npy":
        array = _load_npy(path)
        return [path.stem], lambda name: array
    with open_regular(path) as file:
        content = torch.load(file, map_location="cpu", weights_only=True)
    if isinstance(content, (tuple, list)):
        content = dict(enumerate(content))
    elif not isinstance(content, Mapping):
        content = {path.stem: content}
    named = {str(name): part for name, part in content.items()}
    return list(named), named.__getitem__


def _load_member(path: Path, name: str) -> Any:
    # The file is opened for each array, so that none stays open.
    with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
        return arrays[name]


def _load_npy(path: Path) -> Any:
    # Copy on write: torch wants memory that it may write to, and the file must stay as it is.
    with open_regular(path) as file:
        mapped = path.stat().st_size >= _LARGE
        return np.load(path if mapped else file, mmap_mode="c" if mapped else None, allow_pickle=False)


def _as_tensor(value: Any) -> Tensor | None:
    """Makes a tensor of an array or tensor of real numbers, None of anything else; copies only to change byte order."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        value = torch.from_numpy(value.astype(value.dtype.newbyteorder("="), copy=False))
    is_plain = isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_nested or value.is_meta)
    is_real = is_plain and value.ndim > 0 and (value.is_floating_point() or value.dtype in _WHOLE)
    return value.detach() if is_real else None


def _described(value: Any) -> str:
    if not isinstance(value, (Tensor, np.ndarray)):
        return type(value).__name__
    if isinstance(value, Tensor) and (value.is_nested or value.is_meta or value.layout != torch.strided):
        return "a nested tensor" if value.is_nested else f"a {'meta' if value.is_meta else value.layout} tensor"
    return f"{value.dtype} values of shape {tuple(value.shape)}"


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
    chosen = layout
    if layout == "auto":  # floating arrays of these shapes may also be sequences or volumes
        last = array.ndim == 4 and array.shape[3] in _CHANNELS and array.shape[1] not in _CHANNELS
        guess: Layout = "NHW" if array.ndim == 3 else "NHWC" if last else "as_is"
        chosen = guess if array.dtype == torch.uint8 else "as_is"
    if chosen == "as_is":
        return array
    if array.ndim != len(chosen):
        raise FederatedError(
            f"Expected {name} to have {len(chosen)} dimensions for `--data.layout` {layout}, got shape "
            f"{tuple(array.shape)}: set `--data.layout as_is` to leave its dimensions as they are."
        )
    return array.unsqueeze(1) if chosen == "NHW" else array.movedim(3, 1)


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
