"""Files that are whole at every moment, and one sentence for each that the system refuses to write."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from lightning_fed.errors import FederatedError

__all__ = ["WriteError", "append_whole", "open_atomically", "write_atomically", "writing"]

_RUNS = "--trainer.default_root_dir"


class WriteError(FederatedError):
    """The system refused to write a file; the former one, if there was one, is whole.

    Attributes:
        written: Of several files those that were written before it.
    """

    written: Sequence[Path] = ()


@contextmanager
def writing(path: Path, option: str = _RUNS, what: str = "") -> Iterator[None]:
    """Turns what the system says when it refuses a write into one sentence.

    Args:
        path: What is written within the block.
        option: What names the place.
        what: What it is, if not the file itself, such as ``a folder in ``.
    """
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"Expected to write {what}{path}, but the system refuses ({error.strerror or error}): make room, see that "
            f"it may be written to, or change `{option}`."
        ) from error


@contextmanager
def open_atomically(path: Path, option: str = _RUNS) -> Iterator[BinaryIO]:
    """Opens a file that takes the place of the old one when the block ends without an exception.

    Its folder is made, but not that of a run: if it was removed, no start could tell whose it is.

    Raises:
        WriteError: If the system refuses; the old file stays, and nothing is left beside it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path, option):
        if option != _RUNS or any((above / "run.json").is_file() for above in path.parents[1:]):
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes, option: str = _RUNS) -> None:
    """Writes a file so that it holds either the old content or the new, whenever the process dies."""
    with open_atomically(path, option) as file:
        file.write(content)


def append_whole(path: Path, content: bytes) -> None:
    """Appends to a file that is there, all or, where the system refuses, nothing."""
    with writing(path), open(path, "rb+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            while content:
                content = content[file.write(content) :]
        except OSError:
            os.ftruncate(file.fileno(), size)
            raise
