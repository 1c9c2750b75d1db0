"""Decoded images in a file of their own, so that they are decoded once."""

import hashlib
import os
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from torch import Tensor

from lightning_fed.errors import FederatedError

__all__ = ["cached_tensors", "default_cache_folder", "fingerprint_of"]

# What torch raises for a file that was cut, changed, or is of another kind.
_UNREADABLE = (OSError, EOFError, RuntimeError, ValueError, LookupError, pickle.UnpicklingError, zipfile.BadZipFile)


def default_cache_folder() -> Path:
    """Returns the user's cache folder for this package."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_fed"


def fingerprint_of(paths: Iterable[Path], root: Path) -> str:
    """Returns a hash over names below ``root``, sizes and times of change of files, in hexadecimal."""
    digest = hashlib.sha256()
    for path in paths:
        status = path.stat()
        digest.update(f"{path.relative_to(root).as_posix()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def cached_tensors(path: Path, fingerprint: str, make: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Returns tensors from a file, or makes them and writes the file.

    It is made anew when it is damaged, down to one bit of an image, or was made for another fingerprint. A process that
    dies while it writes leaves the former file as it was.

    Args:
        path: The file.
        fingerprint: Names what the tensors are made from.
        make: Makes them.

    Raises:
        FederatedError: If the file cannot be written.
    """
    tensors = _read(path, fingerprint)
    if tensors is not None:
        return tensors
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Opened first: a folder that cannot be written to is found before the long work, not after it.
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                tensors = make()
                content = {"fingerprint": fingerprint, "checksum": _checksum(tensors), "tensors": tensors}
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
            finally:
                Path(file.name).unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:  # torch raises either for a full disk
        raise FederatedError(
            f"Expected to keep decoded images in {path}, but that failed ({error}): set "
            "`--data.cache_dir` to a folder that can be written to and has room."
        ) from error
    return tensors


def _read(path: Path, fingerprint: str) -> list[Tensor] | None:
    """Reads the file, None if there is none, it is damaged, or it is another one's."""
    if not path.is_file():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except _UNREADABLE:
        return None
    if not isinstance(content, dict) or content.get("fingerprint") != fingerprint:
        return None
    tensors: list[Tensor] = content["tensors"]
    return tensors if content["checksum"] == _checksum(tensors) else None


def _checksum(tensors: list[Tensor]) -> int:
    # torch.load does not look at the checksums that the format has for itself.
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(tensor.contiguous().numpy().data.cast("B"), checksum)
    return checksum
