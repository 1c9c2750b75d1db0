"""Tables as text, and names of somebody else's as a terminal, a picture or a spreadsheet takes them."""

import csv
import io
import re
from collections.abc import Iterable, Sequence

__all__ = ["aligned", "csv_text", "no_formula", "no_mathematics", "one_line"]


# A number as tables write it, with what stands beside it: "-0.3 ± 0.1", "-0.3 (-0.5 to 0.1)", "+1.2*".
_NUMBER = re.compile(r"[+-]?(\d[\d,.]*|\.\d+|inf|nan)(e[+-]?\d+)?[^A-Za-z=@|!]*( to [^A-Za-z=@|!]*)?")


def one_line(text: str) -> str:
    """Puts a space in the place of what moves, ends or recolours a line, and of what no encoding has."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def no_mathematics(text: str) -> str:
    """Keeps matplotlib from reading what stands between two dollars as a formula."""
    return text.replace("$", r"\$")


def no_formula(cell: str) -> str:
    """Writes an apostrophe before a cell that a spreadsheet would compute, but not before a number."""
    begins = re.match(r"[\t\r]|\s*[-=@+\uff1d\uff0b\uff0d\uff20]", cell)
    return f"'{cell}" if begins and not _NUMBER.fullmatch(cell) else cell


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lays lines of cells out in columns of spaces."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def csv_text(lines: Iterable[Sequence[object]], end: str = "\r\n") -> str:
    """Writes lines of cells, separated by commas; no text in them is a formula of a spreadsheet."""
    text = io.StringIO()
    safe = ([no_formula(cell) if isinstance(cell, str) else cell for cell in line] for line in lines)
    csv.writer(text, lineterminator=end).writerows(safe)
    return text.getvalue()
