"""Named arrays in files: .npz, .npy, .pt, or a folder of .npy files, read one by one with checks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_fed.core.files import open_regular
from lightning_fed.data.readers.downloads import found_none
from lightning_fed.errors import FederatedError

__all__ = ["SUFFIXES", "ArrayFile"]

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
        self.path = path
        self._option = option
        self._check_path()
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

    def _check_path(self) -> None:
        if not self.path.exists():
            raise found_none("the file", self.path, self._option)
        if not self.path.is_dir() and self.path.suffix not in SUFFIXES:
            raise FederatedError(
                f"Expected `{self._option}` to name a file that ends in {', '.join(SUFFIXES)} or a folder of .npy "
                f"files, got {self.path}."
            )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever the system, NumPy and torch raise on a damaged file
            refused = error.strerror if isinstance(error, OSError) else None
            advice = "it is truncated, damaged, or holds other objects; write it again"
            raise FederatedError(
                f"The file {self.path} cannot be read ({refused}): change its permissions, or change `{self._option}`."
                if refused
                else f"The file {self.path} cannot be read as arrays ({type(error).__name__}): {advice}, or change "
                f"`{self._option}`."
            ) from error


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
