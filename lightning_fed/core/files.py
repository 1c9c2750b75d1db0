"""Writes files so that they are never half-written, and turns a refused write into one sentence."""

import csv
import errno
import io
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from lightning_fed.errors import FederatedError

__all__ = [
    "WriteError", "append_whole", "csv_text", "open_atomically", "open_regular", "png", "read_regular",
    "write_atomically", "writing",
]  # fmt: skip

_RUNS = "--trainer.default_root_dir"


class WriteError(FederatedError):
    """The system refused to write a file; its former version, if any, is intact.

    Attributes:
        written: The files written before it, where several were to be written.
    """

    written: Sequence[Path] = ()


@contextmanager
def writing(path: Path, option: str = _RUNS, what: str = "") -> Iterator[None]:
    """Turns what the system says when it refuses a write into one sentence.

    Args:
        path: What is written within the block.
        option: The option that sets the path.
        what: Put before the path in the message, such as ``a folder in ``.
    """
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"Expected to write {what}{path}, but the system refuses ({error.strerror or error}): free disk "
            f"space, check its permissions, or change `{option}`."
        ) from error


@contextmanager
def open_atomically(path: Path, option: str = _RUNS) -> Iterator[BinaryIO]:
    """Opens a file that takes the place of the old one when the block ends without an exception.

    Its folder is made if it is missing, but a removed run folder is not: without ``run.json`` nobody knows its run.

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


def append_whole(path: Path, content: bytes, option: str = _RUNS) -> None:
    """Appends to an existing file: all of the content, or nothing if the system refuses."""
    with writing(path, option), open(path, "rb+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            while content:
                content = content[file.write(content) :]
        except OSError:
            os.ftruncate(file.fileno(), size)
            raise


def open_regular(path: Path | str, limit: int | None = None) -> BinaryIO:
    """Opens a file to read; a pipe or a device, which may never end, is refused before anything waits for it.

    Args:
        path: The file, or a link to it.
        limit: The most bytes that it may have.

    Raises:
        OSError: If the system refuses, if the path names no regular file, or one with more bytes.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    found = os.fstat(file.fileno())
    if stat.S_ISREG(found.st_mode) and (limit is None or found.st_size <= limit):
        return file
    file.close()
    what = f"more than {limit:,} bytes" if stat.S_ISREG(found.st_mode) else "no regular file"
    raise OSError(errno.EINVAL, what, str(path))


def read_regular(path: Path | str, limit: int = 1 << 28) -> bytes:
    """Reads a whole file, which :func:`open_regular` opens."""
    with open_regular(path, limit) as file:
        return file.read(limit)  # a file of /proc says that it has none


def csv_text(rows: Iterable[Sequence[Any]], end: str = "\n") -> str:
    """Writes rows of cells as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator=end).writerows(rows)
    return text.getvalue()


def png(figure: Any, dpi: float | str = "figure", kind: str = "png") -> bytes:
    """Returns a matplotlib figure as the bytes of a PNG file, or of another kind; the same bytes each time."""
    drawn, undated = io.BytesIO(), {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    figure.savefig(drawn, format=kind, dpi=dpi, metadata=undated.get(kind))
    return drawn.getvalue()
