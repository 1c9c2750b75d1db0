"""Figures that pages of results print are those of the tables beside them, which `report --study` draws from CSVs."""

import csv
import gzip
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean, stdev

import pytest
import yaml
from scipy import stats

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGES = sorted(page for page in RESULTS.rglob("*.md") if "/table.md)" in page.read_text())

# Means that no table has: over the seeds that have not diverged, and of other columns.
# On the page of own models, pairs of methods of which none is the baseline: a test of their own has them.
NOT_IN_TABLES = {"gma/learning-rates.md": 2, "gma/threshold.md": 2, "personal.md": 30}

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


def test_the_index_counts_cells_that_exclude_neither_0_nor_the_papers_gain() -> None:
    page, cells = " ".join((RESULTS / "index.md").read_text().split()), list(gains())
    undecided = [table for table, without_gain, without_zero in cells if not (without_gain or without_zero)]
    assert f"Of {len(cells)} cells with a published gain" in page
    assert f"{len(undecided)} have a 95 % CI that contains both 0 and the paper's gain" in page


def test_the_words_of_the_tables_are_counted_on_the_index() -> None:
    rows = [row for path in sorted(RESULTS.rglob("table.csv")) for row in csv.DictReader(path.open())]
    words = Counter(row["verdict"] for row in rows if row["verdict"] and row["published"])
    page = " ".join((RESULTS / "index.md").read_text().split())
    assert f"{words['nothing learned']} cells in which nothing was learned left out" in page
    assert f"of {sum(words.values())} differences with a published gain {words['reproduced']} are reproduced" in page
    assert f"{words['contradicted']} contradicted, {words['undecided']} undecided, and in" in page
    assert f"and in {words['nothing learned']} nothing was learned" in page


# Rows of the index that no table holds: older runs, and what was not run.
OLDER = {
    "Table 2, FashionMNIST, 2 classes, 200 rounds: the mask gains °": "undecided",
    "Table 2, FashionMNIST, 2 classes, 200 rounds: FedAdam is ahead of FedAvg °": "undecided",
    "Table 1 (there FEMNIST, here FashionMNIST), α = 0.2, rounds 171 to 200: the correction gains °": "undecided",
    "Table 1, EMNIST, one class per client, 600 communication rounds: FedGA gains over FedAvg °": "undecided",
    "(our question) from the same model, 5 of 10 drawn, the mask's direction gains on the other clients": "not run",
    "(our question) from the same model, 2 of 10 drawn, the mask's direction gains on the other clients": "not run",
    "Section 1, label skew, perceptron: the mask's direction is better than the mean's at the same progress": "not run",
    "Tables 2, 3 and 6 on CIFAR, FEMNIST and other numbers of clients; Table 7; Figure 2": "not run",
    "α of 0.1 and 0.3, rounds 901 to 1,000": "not run",
    "Table 1, CIFAR-10 and EMNIST at full size; Figures 2 and 5 to 7; Figure 8 on CIFAR-100": "not run",
}
Curves = list[dict[int, float]]


def index_rows() -> dict[str, tuple[str, str, str, str]]:
    """Ours, the paper's, verdict and page by claim, as the index prints them."""
    lines = (RESULTS / "index.md").read_text().partition("| claim |")[2].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {claim: (ours, paper, verdict, page) for claim, ours, paper, verdict, page in cells if verdict}


def claimed_rows() -> dict[str, dict[str, str]]:
    """The study, metric and cell of each claim."""
    return {row["claim"]: row for row in csv.DictReader((RESULTS / "claims.csv").open())}


def tied() -> list[str]:
    return sorted(claim for claim, row in claimed_rows().items() if row["folder"])


def axes_of(text: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in text.split(";"))


@cache
def rows_of(folder: str) -> list[dict[str, str]]:
    attacks = RESULTS / folder / "attack.csv"
    with attacks.open() if attacks.is_file() else gzip.open(RESULTS / folder / "curves.csv.gz", "rt") as file:
        return list(csv.DictReader(file))


def curves(folder: str, axes: dict[str, str], metric: str) -> Curves:
    """The curve of each seed of a cell, in the order of seeds."""
    found: dict[int, dict[int, float]] = defaultdict(dict)
    for row in rows_of(folder):
        if axes.items() <= row.items() and row[metric]:
            found[int(row["seed"])][int(row.get("round", 0))] = float(row[metric])
    return [found[seed] for seed in sorted(found)]


def statistic_of(curve: dict[int, float], name: str, metric: str, sent: dict[int, float]) -> float:
    first, _, second = name.partition(" less ")
    if second:
        return statistic_of(curve, first, metric, sent) - statistic_of(curve, second, metric, sent)
    kind, _, of = name.partition(" ")
    if kind == "best":
        return min(curve.values()) if re.search("loss|distance", metric) else max(curve.values())
    if kind == "communication":
        return next(curve[at] for at in curve if sent.get(at) == float(of))
    low, high = map(int, of.split("-")) if kind == "rounds" else (max(curve) - int(of or 1) + 1, max(curve))
    return fmean(value for at, value in curve.items() if low <= at <= high)


def has_settled(of: Curves, scale: float) -> bool:
    at = sorted(set.intersection(*map(set, of)))
    ends, starts = ([c[r] for c in of for r in at if at[-1] * (1 - a) < r <= at[-1] * (1 - b)] for a, b in TENTHS)
    return bool(ends and starts) and abs(fmean(ends) - fmean(starts)) <= 0.005 * scale


TENTHS = ((0.1, 0.0), (0.2, 0.1))


def published(row: dict[str, str]) -> list[float]:
    """The paper's figures of both cells, means over their rows; none where there is none."""
    if row["published"][:1].isdecimal():
        return [float(number) / 100 for number in row["published"].split("-")]
    path = RESULTS / row["folder"] / "table.csv"
    table = list(csv.DictReader(path.open())) if path.is_file() else []
    ours, figures = axes_of(row["ours"]), []
    for axes in (ours, ours | axes_of(row["baseline"])):
        per_window = [
            [float(one["published"]) for one in table if one["published"] and (axes | window).items() <= one.items()]
            for window in ({"metric": row["metric"], "statistic": name} for name in row["statistic"].split(" less "))
        ]
        figures += [fmean(per_window[0]) - sum(map(fmean, per_window[1:]))] if per_window[0] else []
    return figures if len(figures) == 2 else []


def recomputed(row: dict[str, str]) -> tuple[tuple[float, float, float], float | None, str]:
    """Difference and interval, the paper's gain, and the verdict, by the protocol from curves."""
    metric, ours = row["metric"], axes_of(row["ours"])
    sides = [curves(row["folder"], axes, metric) for axes in (ours, ours | axes_of(row["baseline"]))]
    sent: list[Curves] = [
        curves(row["folder"], axes, "comm/rounds") if row["statistic"].startswith("communication") else [{}] * len(side)
        for axes, side in zip((ours, ours | axes_of(row["baseline"])), sides, strict=True)
    ]
    values = [
        [statistic_of(curve, row["statistic"], metric, x) for curve, x in zip(side, xs, strict=True)]
        for side, xs in zip(sides, sent, strict=True)
    ]
    differences = [a - b for a, b in zip(*values, strict=True)]
    n, mean, base = len(differences), fmean(differences), fmean(values[1])
    half = float(stats.t.ppf(0.975, n - 1)) * stdev(differences) / n**0.5
    figures = published(row)
    gain = figures[0] - figures[1] if figures else None
    direction = (-1 if row["sign"] == "-" else 1) if gain is None else math.copysign(1, gain)
    least = abs(gain) if gain is not None else float(row["sign"]) if row["sign"] not in "+-" else 0.0
    low, high = sorted((direction * (mean - half), direction * (mean + half)))
    scale = 1.0 if re.search("acc|agreement", metric) else abs(base)
    level = " less " not in row["statistic"] and all(has_settled(side, scale) for side in sides)
    level = level or bool(figures and row["published"] != "of other data" and abs(base - figures[1]) <= 0.03)
    word = "reproduced" if low > 0 else "contradicted" if high < least and level else "undecided"
    if row["gate"] and base < float(row["gate"]):
        word = "nothing learned"
    return (mean, mean - half, mean + half), gain, word


def test_every_row_of_the_index_is_tied_to_a_study_or_listed() -> None:
    printed_rows, rows = index_rows(), claimed_rows()
    assert [*printed_rows] == [*rows]
    assert {claim: printed_rows[claim][2] for claim, row in rows.items() if not row["folder"]} == OLDER
    assert {verdict for *_, verdict, _ in printed_rows.values()} <= {
        "reproduced", "contradicted", "undecided", "nothing learned", "not run"
    }  # fmt: skip


@pytest.mark.parametrize("claim", tied())
def test_a_verdict_of_the_index_is_that_of_its_csvs(claim: str) -> None:
    row = claimed_rows()[claim]
    ours, paper, verdict, page = index_rows()[claim]
    numbers, gain, word = recomputed(row)
    scale = 100 if re.search("acc|agreement", row["metric"]) else 1
    match = re.fullmatch(rf"({NUMBER}) \(({NUMBER}) to ({NUMBER})\)", ours)
    assert match
    assert is_rounded(match.groups(), [repr(number) for number in numbers], scale)
    assert paper == row["published"] if gain is None else is_rounded((paper,), [repr(gain)], 100)
    assert (verdict, page) == (word, row["page"])


@pytest.mark.parametrize("claim", tied())
def test_gates_and_gains_are_those_of_the_study(claim: str) -> None:
    row = claimed_rows()[claim]
    results = RESULTS / row["folder"] / "results.csv"
    study = next(csv.DictReader(results.open()))["study"] if results.is_file() else row["folder"]
    report = yaml.safe_load((RESULTS.parents[1] / "configs" / "studies" / f"{study}.yaml").read_text())["report"]
    first = [report["metric"]] if isinstance(report["metric"], str) else report["metric"]
    if "learned" in report and row["metric"] == first[0] and " less " not in row["statistic"]:
        assert float(row["gate"]) == report["learned"]
    if "gain" in report:
        assert float(row["sign"]) == report["gain"]


def test_each_rival_has_a_sentence_with_the_numbers_and_the_word_of_its_cell() -> None:
    table = csv.DictReader((RESULTS / "rivals/digits/table.csv").open())
    cells = {row["rule"]: row for row in table if row["metric"] == "test/acc" and row["difference"]}
    sentence = re.compile(rf"^- \*\*(.+?)\*\*: ({NUMBER}) \(({NUMBER}) to ({NUMBER})\), \*([\w ]+)\*", re.M)
    told = {rule: (numbers, word) for rule, *numbers, word in sentence.findall((RESULTS / "rivals.md").read_text())}
    assert told.keys() == cells.keys()
    for rule, (numbers, word) in told.items():
        row = cells[rule]
        assert is_rounded(tuple(numbers), [row[name] for name in ("difference", "t_low", "t_high")], 100), rule
        assert word == row["verdict"], rule


TEST, WORST, WRONG, NEW = "test/acc", "per_client/acc_worst", "test/acc/wrong", "test/acc/new_scheme"


SETTINGS = {
    "digits": ("digits", TEST),
    "FashionMNIST": ("fashionmnist", TEST),
    "EMNIST": ("one_class", TEST),
    "shuffled labels": ("shuffled", TEST),
    "new colours": ("new_colours", NEW),
}


def rivals_of(study: str, metric: str, shared: str = "") -> dict[str, dict[str, str]]:
    """Rows of a study's table by rule, where a number of clients share a signature."""
    table = csv.DictReader((RESULTS / "rivals" / study / "table.csv").open())
    return {row["rule"]: row for row in table if row["metric"] == metric and row.get("shared by", "") == shared}


def lines_of(part: str, rules: set[str]) -> dict[str, list[str]]:
    """Cells of the lines of a page that begin with a rule."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:2] == "| "]
    named = {re.sub(r"\[(.*)\]\(.*\)", r"\1", first): cells for first, *cells in lines}
    return {name: cells for name, cells in named.items() if name in rules}


@pytest.mark.parametrize(
    ("heading", "study", "columns"),
    [
        ("## The table", "digits", [(TEST, ""), (WORST, "")]),
        ("## FashionMNIST, two classes a client", "fashionmnist", [(TEST, ""), (WORST, "")]),
        ("## EMNIST, one class a client", "one_class", [(TEST, ""), (WORST, "")]),
        ("## Where the mask is right", "signatures", [(WRONG, "1"), (WRONG, "2"), (WRONG, "5")]),
        ("## A tenth of the clients with shuffled labels", "shuffled", [(TEST, "")]),
        ("## Colours that no client has", "new_colours", [(NEW, ""), ("val/acc", "")]),
    ],
)
def test_the_rivals_have_the_numbers_of_their_table(heading: str, study: str, columns: list[tuple[str, str]]) -> None:
    part = (RESULTS / "rivals.md").read_text().partition(heading)[2].partition("\n## ")[0]
    cells = [rivals_of(study, *column) for column in columns]
    told = lines_of(part, set().union(*cells))
    assert told.keys() == set().union(*cells)
    for rule in told.keys() - {"FedAvg"}:
        rows = [each[rule] for each in cells if rule in each]
        for numbers, row in zip(
            re.findall(PRINTED["difference", "t_low", "t_high"], " ".join(told[rule])), rows, strict=True
        ):
            assert is_rounded(numbers, [row[name] for name in ("difference", "t_low", "t_high")], 100), rule


def test_at_a_glance_what_excludes_0_is_bold() -> None:
    columns = [rivals_of(*study) for study in SETTINGS.values()] + [rivals_of("signatures", WRONG, k) for k in "12"]
    part = (RESULTS / "rivals.md").read_text().partition("## Seven settings at a glance")[2].partition("\n## ")[0]
    rules = set().union(*columns)
    told = lines_of(part, rules)
    assert told.keys() == rules
    for rule, cells in told.items():
        for cell, column in zip(cells, columns, strict=True):
            row = column.get(rule)
            assert (row is None) == (not cell)
            if row is not None:
                sure = bool(row["difference"]) and not float(row["t_low"]) <= 0 <= float(row["t_high"])
                assert is_rounded((cell.strip("*"),), [row["difference" if row["difference"] else "mean"]], 100), rule
                assert cell.startswith("**") == sure, rule


def elsewhere(rule: str) -> str:
    """Where a rule is ahead, behind and neither, but on the digits, as the page says it."""
    rows = {name: rivals_of(*of).get(rule) for name, of in SETTINGS.items() if name != "digits"}
    of_k = {k: rivals_of("signatures", WRONG, k)[rule] for k in "125"}
    found = []
    for side in ("ahead", "behind", "neither ahead nor behind"):
        names = [name for name, row in rows.items() if row and side_of(row) == side]
        ks = ", ".join(k for k, row in of_k.items() if side_of(row) == side)
        if names := [*names, *([f"signatures (k = {ks})"] if ks else [])]:
            found.append(f"{side} on {', '.join(names)}")
    return "; ".join(found)


def side_of(row: dict[str, str]) -> str:
    low, high = float(row["t_low"]), float(row["t_high"])
    return "ahead" if low > 0 else "behind" if high < 0 else "neither ahead nor behind"


def test_where_else_a_rule_is_ahead_or_behind_follows_from_the_tables() -> None:
    sentences = re.findall(r"^- \*\*(.+?)\*\*:.*Elsewhere (.*)\.$", (RESULTS / "rivals.md").read_text(), re.M)
    assert len(sentences) == 26
    assert {rule: elsewhere(rule) for rule, _ in sentences} == dict(sentences)


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


def test_bytes_of_codecs_and_until_70_percent_are_those_of_the_curves() -> None:
    part = (RESULTS / "compression.md").read_text().partition("## The table")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:2] == "| "]
    told = {first: (cells[0], cells[-1]) for first, *cells in lines if cells[0][0].isdecimal()}
    assert len(told) == 15
    for name, (packet, until) in told.items():
        rule, _, codec = name.partition(", ")
        axes = {"rule": rule, "codec": codec or "none"}
        sent, right = (curves("compression/fashionmnist", axes, metric) for metric in ("comm/bytes_up", "test/acc"))
        assert int(packet.replace(",", "")) == sent[0][1] / 20  # clients of the first round
        first = next(at for at in sorted(right[0]) if fmean(curve[at] for curve in right) >= 0.7)
        assert is_rounded((until,), [str(sent[0][first] / 1e6)], 1), name


def test_what_attacks_prove_follows_from_their_right_answers() -> None:
    part = (RESULTS / "privacy.md").read_text().partition("| privacy | most right")[2].partition("\n\n")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines()[2:]]
    assert [line[0] for line in lines] == ["none", "clip alone", "ε = 50", "ε = 8", "ε = 2"]
    for privacy, by_pair, by_mechanism, right, true_pair, true_mechanism, true, proven in lines:
        axes = {"own data": "a signature", "privacy": privacy}
        cells = {name: curves("privacy/attack", axes, f"attack/client/{name}") for name in ("accuracy", "tpr_at_0.01")}
        accuracy, found = ([curve[100] for curve in cells[name]] for name in cells)
        assert is_rounded((right.rstrip(" %"),), [str(fmean(accuracy))], 100)
        assert is_rounded((true,), [str(fmean(found))], 1)
        count, of, delta = sum(round(250 * one) for one in accuracy), 250 * 5, 0.001
        low = stats.binomtest(count, of).proportion_ci(0.95).low
        assert is_rounded((proven,), [str(math.log((low - delta) / (1 - low)))], 1)
        if privacy[0] == "ε":
            factor = math.exp(float(privacy[4:]))
            assert is_rounded((by_pair.rstrip(" %"),), [str((factor + delta) / (factor + 1))], 100)
            most = min(factor * 0.01 + delta, 1 - (0.99 - delta) / factor)
            assert is_rounded((true_pair,), [str(most)], 1)
            assert float(by_mechanism.rstrip(" %")) <= float(by_pair.rstrip(" %"))
            assert float(true_mechanism) <= float(true_pair)
