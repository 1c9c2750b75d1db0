"""Named arrays in files: .npz, .npy, .pt, or a folder of .npy files, read one by one with checks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_fed.data.readers.downloads import found_none
from lightning_fed.errors import FederatedError

__all__ = ["SUFFIXES", "ArrayFile"]

SUFFIXES = (".npz", ".npy", ".pt", ".pth")

# From this many bytes on, a file is memory-mapped: its pages are read when they are used, and can be dropped again.
_LARGE = 2**28
_MOST_NAMES = 12
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
            is_array = isinstance(value, (Tensor, np.ndarray))
            described = f"{value.dtype} values of shape {tuple(value.shape)}" if is_array else type(value).__name__
            raise FederatedError(
                f"Expected {name} in {self.path} to be an array of real numbers with one row per sample, got "
                f"{described}: change `{option}`."
            )
        return tensor

    def listing(self) -> str:
        """Returns the names for a message, the first dozen if there are more."""
        more = f" and {len(self.names) - _MOST_NAMES} others" if len(self.names) > _MOST_NAMES else ""
        return (", ".join(self.names[:_MOST_NAMES]) or "no array") + more

    def _check_path(self) -> None:
        if not self.path.exists():
            raise found_none("the file", self.path, self._option)
        if self.path.is_file() and self.path.suffix not in SUFFIXES:
            raise FederatedError(
                f"Expected `{self._option}` to name a file that ends in {', '.join(SUFFIXES)} or a folder of .npy "
                f"files, got {self.path}."
            )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except PermissionError as error:
            raise FederatedError(
                f"The file {self.path} cannot be read ({error.strerror}): change its permissions, or change "
                f"`{self._option}`."
            ) from error
        except Exception as error:  # whatever NumPy and torch raise on a damaged file
            raise FederatedError(
                f"The file {self.path} cannot be read as arrays ({type(error).__name__}): it is truncated, damaged, "
                f"or holds other objects; write it again, or change `{self._option}`."
            ) from error


def _open(path: Path) -> tuple[list[str], _Read]:
    if path.is_dir():
        return sorted(file.stem for file in path.glob("*.npy")), lambda name: _load_npy(path / f"{name}.npy")
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            return list(arrays.files), lambda name: _load_member(path, name)
    if path.suffix == ".npy":
        array = _load_npy(path)
        return [path.stem], lambda name: array
    content = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(content, (tuple, list)):
        content = dict(enumerate(content))
    elif not isinstance(content, Mapping):
        content = {path.stem: content}
    named = {str(name): part for name, part in content.items()}
    return list(named), named.__getitem__


def _load_member(path: Path, name: str) -> Any:
    # The file is opened for each array, so that none stays open.
    with np.load(path, allow_pickle=False) as arrays:
        return arrays[name]


def _load_npy(path: Path) -> Any:
    # Copy on write: torch wants memory that it may write to, and the file must stay as it is.
    mapped = path.stat().st_size >= _LARGE
    return np.load(path, mmap_mode="c" if mapped else None, allow_pickle=False)


def _as_tensor(value: Any) -> Tensor | None:
    """Makes a tensor of an array or tensor of real numbers, None of anything else; copies only to change byte order."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        value = torch.from_numpy(value.astype(value.dtype.newbyteorder("="), copy=False))
    is_numbers = isinstance(value, Tensor) and value.ndim > 0 and not value.is_complex()
    return value.detach() if is_numbers else None
