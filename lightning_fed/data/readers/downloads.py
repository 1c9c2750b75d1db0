"""The folder of data sets, and downloads into it that are complete or leave nothing."""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning_fed.errors import FederatedError

__all__ = ["data_folder", "fetch_whole", "found_none"]

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
