"""What the laboratory shares: a parser, packages of extras, names that must be known, and texts of somebody else's."""

import argparse
import csv
import io
import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from lightning_fed.errors import FederatedError

__all__ = [
    "CommandParser", "aligned", "are", "csv_text", "expect_known", "import_extra", "no_apostrophe", "no_formula",
    "no_mathematics", "one_line",
]  # fmt: skip


class CommandParser(argparse.ArgumentParser):
    """Tells a mistake in one sentence, as the other commands do."""

    def error(self, message: str) -> NoReturn:
        """Raises the sentence."""
        raise FederatedError(f"Expected `{self.prog}` with options that `{self.prog} --help` lists: {message}.")


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """Imports a module of a package that one of the extras installs."""
    package = module.partition(".")[0]
    try:
        import_module(package)
        return import_module(module)
    except ImportError as error:
        raise FederatedError(
            f"Expected {package} for {purpose}, which cannot be imported ({error}): run "
            f"`pip install 'lightning_fed[{extra}]'`."
        ) from error


def expect_known(place: str, names: Iterable[str], known: Iterable[str], what: str) -> None:
    """Refuses the first of some names, given by an option or a key, that is not known; ``what`` says what they are."""
    known = list(known)
    for name in names:
        if name not in known:
            there = ", ".join(known) or "none"
            raise FederatedError(f"Expected `{place}` to name {what} ({there}), got {name!r}.")


# A number, or several as tables write them: "-0.3 ± 0.1", "+0.5 (-0.1 to +0.9)", "+1.2*".
_ONE = r"[+-]?(?:\d[\d,.]*|\.\d+|inf|nan)(?:e[+-]?\d+)?[%*)]*"
_NUMBERS = re.compile(rf"{_ONE}(?:(?: ?\(| ± | to |, | ){_ONE})*")


def one_line(text: str) -> str:
    """Puts a space in the place of what moves, ends or recolours a line, and of what no encoding has."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def no_mathematics(text: str) -> str:
    """Keeps matplotlib from reading what stands between two dollars as a formula."""
    return text.replace("$", r"\$")


def no_formula(cell: str) -> str:
    """Writes an apostrophe before a cell that a spreadsheet would compute, but not before a number."""
    begins = re.match(r"'*([\t\r]|\s*[-=@+\uff1d\uff0b\uff0d\uff20])", cell)
    return f"'{cell}" if begins and not _NUMBERS.fullmatch(cell) else cell


def no_apostrophe(cell: str) -> str:
    """Takes off what ``no_formula`` has written."""
    return cell[1:] if cell.startswith("'") and no_formula(cell[1:]) == cell else cell


def are(number: int) -> str:
    """Returns the verb behind a number of things."""
    return "is" if number == 1 else "are"


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
