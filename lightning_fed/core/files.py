"""Files that are whole at every moment."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["open_atomically", "write_atomically"]


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that takes the place of the old one when the block ends without an exception."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that it holds either the old content or the new, whenever the process dies."""
    with open_atomically(path) as file:
        file.write(content)
