"""Figures that pages of results print are those of the tables beside them, which `report --study` draws from CSVs."""

import csv
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median

import numpy as np
import pytest
from scipy import stats

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGES = sorted(page for page in RESULTS.rglob("*.md") if "/table.md)" in page.read_text())

# Means that no table has: over the seeds that have not diverged, and of other columns.
# On the page of own models, pairs of methods of which none is the baseline: a test of their own has them.
# On that of corrupted clients, single runs of the quickstart, whose command is on the page.
NOT_IN_TABLES = {
    "gma/learning-rates.md": 2,
    "gma/participation.md": 8,
    "gma/threshold.md": 2,
    "mask/when.md": 5,
    "personal.md": 30,
    "robustness.md": 12,
}

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


WORDS = "reproduced|contradicted|undecided(?: \\([a-z, ]+\\))?|ahead(?: by less than g)?|level|behind"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(RESULTS)))
def test_a_word_beside_a_difference_is_that_of_its_table(page: Path) -> None:
    rows = measured(page)
    for line in page.read_text().splitlines():
        numbers = PRINTED["difference", "t_low", "t_high"].search(line)
        word = re.search(rf"(?:\| |\*)({WORDS})(?: \||\*)", line[numbers.end() :] if numbers else "")
        if line[:1] in "|-" and numbers and word:
            exact = [[row[name] for name in ("difference", "t_low", "t_high")] for row in rows]
            fit = {row["verdict"] for row, of in zip(rows, exact, strict=True) if is_rounded(numbers.groups(), of, 100)}
            assert word[1] in fit, line


def judged_rows() -> list[dict[str, str]]:
    """The cells of all tables with a published gain and a verdict."""
    rows = [row for path in sorted(RESULTS.rglob("table.csv")) for row in csv.DictReader(path.open())]
    return [row for row in rows if row["verdict"] and row["published"]]


def test_the_index_begins_with_power_and_level() -> None:
    page = " ".join((RESULTS / "index.md").read_text().partition("\n| ")[0].split())
    rows = [row for row in judged_rows() if row["verdict"] != "nothing learned"]
    powers = [seen(float(row["claimed"]), float(row["std_difference"]), int(row["seeds"])) for row in rows]
    levels = [
        float(row["mean"]) - float(row["difference"]) - (float(row["published"]) - float(row["claimed"]))
        for row in rows
    ]
    assert f"Over GMA's {len(rows)} cells with a published gain and a model that has learned" in page
    assert f"the median power to see that gain is {100 * median(powers):.0f} %" in page
    assert f"the median baseline is {-100 * median(levels):.1f} points below the paper's" in page
    for row, able in zip(rows, powers, strict=True):
        assert float(row["power"]) == pytest.approx(able, abs=1e-5)


def seen(gain: float, std: float, n: int) -> float:
    """The probability that a two-sided t-test at 5 % on n pairs sees a gain."""
    edge, shift = float(stats.t.ppf(0.975, n - 1)), abs(gain) * math.sqrt(n) / std
    return float(stats.nct.sf(edge, n - 1, shift) + np.nan_to_num(stats.nct.cdf(-edge, n - 1, shift)))


def test_the_words_of_the_tables_are_counted_on_the_index() -> None:
    rows = judged_rows()
    words = Counter(row["verdict"].partition(" (")[0] for row in rows)
    page = " ".join((RESULTS / "index.md").read_text().split())
    assert f"of its {len(rows)} differences with a published gain {words['reproduced']} are reproduced" in page
    assert f"{words['contradicted']} contradicted, {words['undecided']} undecided, and in" in page
    assert f"and in {words['nothing learned']} nothing was learned" in page
    picture = " ".join((RESULTS / "claims.md").read_text().split())
    assert f"{words['nothing learned']} cells in which nothing was learned left out" in picture


TEST, WORST = "test/acc", "per_client/acc_worst"
WRONG, NEW = "test/acc/wrong", "test/acc/new_scheme"  # of signatures, and of colours


def finals(study: str, method: str, model: str) -> dict[str, float]:
    """Accuracy of a model of the clients at the end, by seed."""
    column = f"per_client/{'' if model == 'global' else model + '/'}acc final"
    rows = csv.DictReader((RESULTS / "personal" / study / "results.csv").open())
    return {row["seed"]: float(row[column]) for row in rows if row["method"] == method and row[column]}


def pairs_of_models() -> dict[tuple[str, str, str], list[str]]:
    """Cells of the pairs on the page of own models, by the two methods and the model."""
    page = (RESULTS / "personal.md").read_text()
    found: dict[tuple[str, str, str], list[str]] = {}
    for heading in ("## Does a mask help or hurt?", "## Is the federation worth it?", "## After one step"):
        part = page.partition(heading)[2].partition("\n## ")[0]
        lines = [line.strip("| ").split(" | ") for line in part.splitlines() if line[:2] == "| "][2:]
        for name, *cells in lines:
            named = re.fullmatch(r"(.+) − (.+), `(\w+)`", name)
            found[named.groups() if named else (name, "local only", "own")] = cells  # type: ignore[index]
    return found


def test_pairs_of_models_are_those_of_the_runs() -> None:
    pairs = pairs_of_models()
    assert len(pairs) == 12
    for (one, other, model), cells in pairs.items():
        for study, cell in zip(("fashionmnist", "emnist", "rotated"), cells, strict=True):
            ours, theirs = (finals(study, method, model) for method in (one, other))
            assert ours.keys() == theirs.keys() == {*"01234"}
            test = stats.ttest_rel([ours[seed] for seed in "01234"], [theirs[seed] for seed in "01234"])
            mean = fmean(ours.values()) - fmean(theirs.values())
            (numbers,) = re.findall(PRINTED["difference", "t_low", "t_high"], cell)
            assert is_rounded(numbers, [str(mean), *map(str, test.confidence_interval())], 100), (one, other, study)


@pytest.mark.parametrize(
    ("page", "sentence", "cells"),
    [
        (
            "personal.md",
            "0.3, 1.0 and 1.7 points (p = {:.3f}, {:.2f} and",
            [
                {"study": f"personal/{name}", "method": "GMA", "metric": "per_client/tuned/acc"}
                for name in ("fashionmnist", "emnist")
            ],
        ),
        (
            "personal.md",
            "by 0.2 (p = {:.3f} after Holm's adjustment)",
            [{"study": "personal/rotated", "method": "Per-FedAvg", "metric": "per_client/tuned/acc"}],
        ),
        (
            "fedgma/colours.md",
            "but p is {:.2f} after Holm's adjustment",
            [
                {
                    "study": "fedgma/figure2",
                    "rule": "FedGMA 0.1",
                    "metric": "test/acc/seen_schemes",
                    "task": "ten classes",
                    "split": "IID",
                }
            ],
        ),
        (
            "gma/participation.md",
            "8.8 points with 5 drawn (p = {:.3f} after Holm's adjustment), and",
            [
                {
                    "study": "gma/tables4_5",
                    "aggregation": "GMA",
                    "metric": "per_client/acc_out",
                    "model of": "AVG",
                    "clients per round": "5",
                }
            ],
        ),
        (
            "gma/train-test.md",
            "On new colours the 95 % CI excludes 0 (p = {:.2f}).",
            [{"study": "gma/figure3a", "aggregation": "GMA", "metric": NEW}],
        ),
        (
            "rivals.md",
            "by the interval (p = {:.2f}, {:.2f} and {:.2f} after Holm's adjustment)",
            [{"study": "rivals/new_colours", "rule": rule, "metric": NEW} for rule in ("SCAFFOLD", "FedGA", "FedCM")],
        ),
        (
            "rivals.md",
            "none of these p-values is below 0.05 (the least is {:.3f}).",
            [{"study": "rivals/one_class", "rule": "FedExP", "metric": TEST}],
        ),
        (
            "rivals.md",
            "gains 0.4 (p = {:.2f}).",
            [{"study": "rivals/signatures", "rule": "GMA", "metric": WRONG, "shared by": "5"}],
        ),
        (
            "rivals.md",
            "**The mask loses** 3.26 points (p = {:.3f} after Holm's adjustment)",
            [{"study": "rivals/one_class", "rule": "GMA", "metric": TEST}],
        ),
        (
            "rivals.md",
            "**The mask costs half a point** (p = {:.3f} after Holm's adjustment)",
            [{"study": "rivals/shuffled", "rule": "GMA", "metric": TEST}],
        ),
    ],
)
def test_p_values_are_adjusted_within_a_metric(page: str, sentence: str, cells: list[dict[str, str]]) -> None:
    found = []
    for cell in cells:
        rows = list(csv.DictReader((RESULTS / cell["study"] / "table.csv").open()))
        of_metric = [row for row in rows if row["metric"] == cell["metric"] and row["p_holm"]]
        (row,) = [row for row in of_metric if all(row[name] == cell[name] for name in cell.keys() - {"study"})]
        # Runs that are alike, such as GMA's and those of a client algorithm beside it, are one test.
        tests = {tuple(other[name] for name in ("mean", "std", "difference", "p")) for other in of_metric}
        ordered = sorted(float(p) for *_, p in tests)
        steps = [(len(ordered) - at) * p for at, p in enumerate(ordered) if p <= float(row["p"])]
        found.append(float(row["p_holm"]))
        assert found[-1] == pytest.approx(min(1.0, max(steps)), rel=1e-4)
    assert sentence.format(*found) in " ".join((RESULTS / page).read_text().split())


@pytest.mark.parametrize(("drawn", "place"), [("5", "with 5 drawn"), ("2", "with 2, where")])
def test_the_masks_direction_from_a_model_that_has_learned_less_is_that_of_the_runs(drawn: str, place: str) -> None:
    with (RESULTS / "gma/tables4_5/results.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if r["model of"] == "AVG" and r["clients per round"] == drawn]
    masked, step, plain = (
        [100 * float(row["per_client/acc_out final"]) for row in rows if row["aggregation"] == name]
        for name in ("GMA", "its progress", "AVG")
    )
    low, high = stats.ttest_rel(masked, step).confidence_interval()
    page = " ".join((RESULTS / "gma/participation.md").read_text().split())
    told = f"{fmean(masked) - fmean(step):+.1f} ({low:+.1f} to {high:+.1f}) {place}".replace("-", "−")
    assert told in page
    gain = fmean(step) - fmean(plain)
    words = {"5": "and FedAvg's step of its progress {:.1f}; with 2", "2": "and that step gains {:.1f}. The mask"}
    assert words[drawn].format(gain) in page
