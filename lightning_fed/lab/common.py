"""Helpers of the laboratory: a parser, imports of extras, checks of names, and safe texts for tables."""

import argparse
import re
from collections.abc import Iterable, Sequence
from typing import NoReturn

from lightning_fed.core import files
from lightning_fed.errors import FederatedError

__all__ = [
    "CommandParser", "aligned", "are", "column_head", "csv_text", "expect_known", "no_apostrophe", "no_formula",
    "no_mathematics",
]  # fmt: skip


class CommandParser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one sentence, as the other commands do."""

    def error(self, message: str) -> NoReturn:
        """Raises the mistake as a FederatedError."""
        raise FederatedError(f"Expected `{self.prog}` with options that `{self.prog} --help` lists: {message}.")


def expect_known(place: str, names: Iterable[str], known: Iterable[str], what: str) -> None:
    """Refuses the first unknown name of an option or a key; ``what`` says what the known names are."""
    known = list(known)
    for name in names:
        if name not in known:
            there = ", ".join(known) or "none"
            raise FederatedError(f"Expected `{place}` to name {what} ({there}), got {name!r}.")


# A number, or several in one cell: "-0.3 ± 0.1", "+0.5 (-0.1 to +0.9)", "+1.2*".
_ONE = r"[+-]?(?:\d[\d,.]*|\.\d+|inf|nan)(?:e[+-]?\d+)?[%*)]*"
_NUMBERS = re.compile(rf"{_ONE}(?:(?: ?\(| ± | to |, | ){_ONE})*")


def no_mathematics(text: str) -> str:
    """Keeps matplotlib from reading a text between two dollar signs as a formula."""
    return text.replace("$", r"\$")


def no_formula(cell: str) -> str:
    """Writes an apostrophe before a cell that a spreadsheet would read as a formula, but not before a number."""
    begins = re.match(r"'*([\t\r]|\s*[-=@+\uff1d\uff0b\uff0d\uff20])", cell)
    return f"'{cell}" if begins and not _NUMBERS.fullmatch(cell) else cell


def no_apostrophe(cell: str) -> str:
    """Removes the apostrophe of ``no_formula``."""
    return cell[1:] if cell.startswith("'") and no_formula(cell[1:]) == cell else cell


def are(number: int) -> str:
    """Returns "is" or "are" after a number of things."""
    return "is" if number == 1 else "are"


def column_head(axes: Sequence[str], column: Iterable[str]) -> str:
    """Returns the head of a column from its values; a number gets the name of its axis, a name like MNIST does not."""
    named = zip(axes, column, strict=True)
    plain = re.compile(r"true|false|null|[-+]?[\d.]+(e[-+]?\d+)?")
    return ", ".join(f"{axis} {value}" if plain.fullmatch(value) else value for axis, value in named)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Aligns lines of cells in columns, with spaces."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def csv_text(lines: Iterable[Sequence[object]], end: str = "\r\n") -> str:
    """Writes lines of cells as CSV; a spreadsheet reads no text in them as a formula."""
    safe = ([no_formula(cell) if isinstance(cell, str) else cell for cell in line] for line in lines)
    return files.csv_text(safe, end)
