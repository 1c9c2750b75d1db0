"""The folder of data sets: downloads into it that are complete or leave nothing, and images that are decoded once."""

import hashlib
import os
import pickle
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from lightning_fed.core.files import WriteError, open_atomically, open_regular
from lightning_fed.errors import FederatedError

__all__ = ["cached_tensors", "data_folder", "fetch_whole", "fingerprint_of", "found_none"]

# What torch raises for a file that was cut, changed, or is of another kind.
_UNREADABLE = (OSError, EOFError, RuntimeError, ValueError, LookupError, pickle.UnpicklingError, zipfile.BadZipFile)

# What a download can end with: no network, no space, a wrong checksum, an archive that cannot be unpacked.
_FAILURES = (OSError, RuntimeError, EOFError, zipfile.BadZipFile)


def data_folder(root: str | os.PathLike[str] | None) -> Path | None:
    """Returns the folder of data sets: ``root``, else what ``LIGHTNING_FED_DATA`` names, None without either."""
    folder = root or os.environ.get("LIGHTNING_FED_DATA")
    return Path(folder).expanduser() if folder else None


def found_none(what: str, path: Path, option: str) -> FederatedError:
    """Makes the error for files that are not where an option says."""
    return FederatedError(
        f"Expected {what} {path.absolute()}, found none: change `{option}`, or set `--data.root` (or the environment "
        "variable LIGHTNING_FED_DATA) to the folder that it lies in."
    )


def fetch_whole(root: Path, folder: str, fetch: Callable[[Path], None]) -> None:
    """Downloads into a temporary folder beside the files' place and moves them there when all are complete.

    A download that is interrupted leaves at most a hidden folder ``ROOT/.download-*``, which nothing reads. ``fetch``
    gets a folder to use instead of ``root``, downloads into it and checks the files.
    """
    top = Path(folder).parts[0]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".download-", dir=root) as temporary:
            fetch(Path(temporary))
            _move(Path(temporary) / top, root / top)
    except _FAILURES as error:
        raise FederatedError(
            f"Expected to download {top} into {root}, but that failed ({error}): put its files into {root / folder} "
            "yourself, or change `--data.root`."
        ) from error


def _move(source: Path, target: Path) -> None:
    """Moves a file or folder; existing files stay, except those of the same name."""
    if source.is_dir() and target.is_dir():
        for child in sorted(source.iterdir()):
            _move(child, target / child.name)
    else:
        os.replace(source, target)


def fingerprint_of(paths: Iterable[Path], root: Path) -> str:
    """Returns a hash, in hexadecimal, of the files' names below ``root``, their sizes and their times of change."""
    digest = hashlib.sha256()
    for path in paths:
        status = path.stat()
        digest.update(f"{path.relative_to(root).as_posix()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def cached_tensors(path: Path, fingerprint: str, make: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Returns tensors from a file, or makes them and writes the file.

    The file is made again if it cannot be read or has another fingerprint, which names what the tensors are made from.
    A process that dies while it writes leaves the old file as it was.
    """
    tensors = _read(path, fingerprint)
    if tensors is not None:
        return tensors
    try:
        # Opened first: a folder that cannot be written to is found before the long work, not after it.
        with open_atomically(path, "--data.cache_dir") as file:
            tensors = make()
            torch.save({"fingerprint": fingerprint, "tensors": tensors}, file)
    except (WriteError, RuntimeError) as error:  # torch raises the latter for a full disk
        raise FederatedError(
            f"Expected to keep decoded images in {path}, but that failed ({error.__cause__ or error}): set "
            "`--data.cache_dir` to a folder that can be written to and has room."
        ) from error
    return tensors


def _read(path: Path, fingerprint: str) -> list[Tensor] | None:
    """Reads the file; None if it is missing or damaged, or has another fingerprint."""
    try:
        with open_regular(path) as file:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except _UNREADABLE:
        return None
    is_ours = isinstance(content, dict) and content.get("fingerprint") == fingerprint
    return content["tensors"] if is_ours else None
