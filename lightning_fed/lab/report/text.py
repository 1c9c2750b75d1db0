"""Texts of somebody else's, such as names of runs, as they may stand in a terminal, a picture or a spreadsheet."""

import re

__all__ = ["no_formula", "no_mathematics", "one_line"]


def one_line(text: str) -> str:
    """Puts a space in the place of what moves, ends or recolours a line, and of what no encoding has."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def no_mathematics(text: str) -> str:
    """Keeps matplotlib from reading what stands between two dollars as a formula."""
    return text.replace("$", r"\$")


def no_formula(cell: str) -> str:
    """Writes an apostrophe before a cell that a spreadsheet would compute, but not before a number."""
    begins = cell.startswith(("=", "@", "+", "-", "\t", "\r"))
    return f"'{cell}" if begins and not re.match(r"[+-]?(\d|\.\d|inf|nan)", cell) else cell
