"""Figures that pages of results print are those of the tables beside them, which `report --study` draws from CSVs."""

import csv
import re
from collections import Counter
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


def gains() -> Iterator[tuple[str, bool, bool]]:
    """Yields each cell with a published gain: its table, whether ours excludes that gain, and whether it excludes 0."""
    for path in sorted(RESULTS.rglob("table.csv")):
        rows = list(csv.DictReader(path.open()))
        axes = list(rows[0])[: list(rows[0]).index("seeds")]
        for row in rows:
            if not (row["difference"] and row["published"] and row["t_low"]):
                continue
            others = [one for one in rows if not one["difference"] and one["published"] and one["mean"]]
            others = [one for one in others if one["statistic"] == row["statistic"] and one["metric"] == row["metric"]]
            base = max(others, key=lambda one: sum(one[name] == row[name] for name in axes), default=None)
            if base is None or float(base["mean"]) <= 0.2:  # at chance
                continue
            gain = float(row["published"]) - float(base["published"])
            low, high = float(row["t_low"]), float(row["t_high"])
            yield path.parent.name, not low <= gain <= high, not low <= 0 <= high


def test_cells_that_exclude_neither_0_nor_the_papers_gain_are_called_undecided() -> None:
    page, cells = (RESULTS / "index.md").read_text(), list(gains())
    undecided = [table for table, without_gain, without_zero in cells if not (without_gain or without_zero)]
    assert f"Of {len(cells)} cells with a published gain" in page
    assert f"{len(undecided)} have a\n95 % interval that holds both 0 and the paper's gain" in page
    verdicts = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| ")]
    for table in {table for table, *_ in cells}:
        of_table = [without_gain or without_zero for name, without_gain, without_zero in cells if name == table]
        if sum(of_table) < len(of_table) / 2:  # most are undecided
            number = re.fullmatch(r"table(\d+).*", table)
            claims = [
                (claim, word)
                for claim, word in verdicts
                if number and f"Table {number[1]}" in claim and "GMA" not in claim
            ]
            assert any("undecided" in word for _, word in claims), (table, claims)
            assert not any(
                word.strip() == "does not hold in our runs" and "mask gains" in claim for claim, word in claims
            )


def test_the_words_of_the_tables_are_counted_on_the_index() -> None:
    rows = [row for path in sorted(RESULTS.rglob("table.csv")) for row in csv.DictReader(path.open())]
    words = Counter(row["verdict"] for row in rows if row["verdict"] and row["published"])
    page = " ".join((RESULTS / "index.md").read_text().split())
    assert f"of {sum(words.values())} differences with a published gain {words['reproduced']} are reproduced" in page
    assert f"{words['contradicted']} contradicted, {words['undecided']} undecided, and in" in page
    assert f"and in {words['nothing learned']} nothing was learned" in page
