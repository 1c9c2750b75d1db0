"""Figures that pages of results print are those of the tables beside them, which `report --study` draws from CSVs."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGES = sorted(page for page in RESULTS.rglob("*.md") if "/table.md)" in page.read_text())

# Means that no table has: over the seeds that have not diverged, and of other columns.
NOT_IN_TABLES = {"gma/learning-rates.md": 2, "gma/threshold.md": 2}

NUMBER = r"[+−-]?\d+(?:\.\d+)?"
PRINTED = {
    ("mean", "std"): re.compile(rf"(?<![\[\d.])({NUMBER}) ± ({NUMBER})"),
    ("difference", "t_low", "t_high"): re.compile(rf"({NUMBER}) \(({NUMBER}) to ({NUMBER})\)"),
}


def printed(page: Path) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yields what the tables of a page print, with the columns that it is of."""
    for line in page.read_text().splitlines():
        for columns, pattern in PRINTED.items() if line.startswith("|") else ():
            yield from ((columns, match) for match in pattern.findall(line))


def measured(page: Path) -> list[dict[str, str]]:
    """The rows of the tables that a page links."""
    folders = re.findall(r"\(([\w/]+)/table\.md\)", page.read_text())
    return [row for folder in folders for row in csv.DictReader((page.parent / folder / "table.csv").open())]


def is_rounded(words: tuple[str, ...], exact: list[str], scale: int) -> bool:
    """Tells whether words are numbers, in percent or as they are, in as many digits as the words have."""
    if not all(exact):
        return False
    numbers = [scale * float(one) for one in exact]
    digits = [len(word.partition(".")[2]) for word in words]
    return all(
        abs(float(word.replace("−", "-")) - number) <= 0.5000001 * 10**-places
        for word, number, places in zip(words, numbers, digits, strict=True)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(RESULTS)))
def test_means_and_differences_are_those_of_a_table(page: Path) -> None:
    rows = measured(page)
    unknown = [
        words
        for columns, words in printed(page)
        if not any(is_rounded(words, [row[name] for name in columns], scale) for row in rows for scale in (1, 100))
    ]
    assert len(unknown) == NOT_IN_TABLES.get(str(page.relative_to(RESULTS)), 0), unknown


def test_what_is_rounded_otherwise_is_told() -> None:
    exact = ["0.637367", "0.0762213"]
    assert is_rounded(("63.7", "7.62"), exact, 100)
    assert not any(is_rounded(words, exact, 100) for words in (("63.8", "7.6"), ("63.7", "7.7"), ("63.74", "7.63")))
    assert is_rounded(("−0.5", "−0.76", "+0.30"), ["-0.005", "-0.0076", "0.003"], 100)
