"""JSON that is decoded value by value, so that a large file is never in memory as objects."""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["JsonText", "read_text"]

_SPACE = re.compile(r"[ \t\n\r]*")


class JsonText:
    """JSON text of which one value at a time is decoded.

    Args:
        text: The whole text. Each method raises ``ValueError`` where it is not what the method expects.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._decode = json.JSONDecoder().raw_decode

    def members(self) -> Iterator[str]:
        """Yields the keys of the object that comes next; the caller takes each key's value before going on."""
        self._take("{")
        if self._next("}"):
            return
        while True:
            key = self.value()
            if not isinstance(key, str):
                raise ValueError("a key that is no string")
            self._take(":")
            yield key
            if self._next("}"):
                return
            self._take(",")

    def value(self) -> Any:
        """Decodes the value that comes next."""
        self._skip()
        value, self._at = self._decode(self._text, self._at)
        return value

    def end(self) -> None:
        """Refuses anything after the value."""
        self._skip()
        if self._at != len(self._text):
            raise ValueError(f"something after the end, at character {self._at}")

    def _next(self, mark: str) -> bool:
        self._skip()
        found = self._text.startswith(mark, self._at)
        self._at += found
        return found

    def _take(self, mark: str) -> None:
        if not self._next(mark):
            raise ValueError(f"expected {mark} at character {self._at}")

    def _skip(self) -> None:
        match = _SPACE.match(self._text, self._at)
        assert match is not None  # it matches nothing as well
        self._at = match.end()


def read_text(path: Path) -> str:
    """Reads a file in UTF-8, packed with gzip if its name ends in ``.gz``."""
    content = path.read_bytes()
    return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
