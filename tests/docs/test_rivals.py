"""What the page of rivals says is what the tables, trials and curves of its studies hold."""

import csv
import gzip
import re
from collections import Counter
from statistics import fmean

import pytest
from scipy import stats

from tests.docs.test_results import NEW, NUMBER, PRINTED, RESULTS, TEST, WORST, WRONG, is_rounded


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
    of_k = {k: rivals_of("signatures", WRONG, k).get(rule) for k in "125"}
    found = []
    for side in ("ahead", "behind", "neither ahead nor behind"):
        names = [name for name, row in rows.items() if row and side_of(row) == side]
        ks = ", ".join(k for k, row in of_k.items() if row and side_of(row) == side)
        if names := [*names, *([f"signatures (k = {ks})"] if ks else [])]:
            found.append(f"{side} on {', '.join(names)}")
    return "; ".join(found)


def side_of(row: dict[str, str]) -> str:
    low, high = float(row["t_low"]), float(row["t_high"])
    return "ahead" if low > 0 else "behind" if high < 0 else "neither ahead nor behind"


def test_where_else_a_rule_is_ahead_or_behind_follows_from_the_tables() -> None:
    sentences = re.findall(r"^- \*\*(.+?)\*\*:.*Elsewhere (.*)\.$", (RESULTS / "rivals.md").read_text(), re.M)
    rules = [rule for rule, row in rivals_of("digits", TEST).items() if row["difference"]]
    assert len(rules) == 33
    assert {rule: where for rule in rules if (where := elsewhere(rule))} == dict(sentences)


def test_the_words_of_the_digits_are_counted() -> None:
    cells = rivals_of("digits", TEST)
    words = Counter(row["here"] for row in cells.values() if row["here"])
    page = " ".join((RESULTS / "rivals.md").read_text().split())
    counted = ", ".join(f"{words[word]} {word}" for word in ("ahead", "behind", "level", "undecided"))
    assert f"of {len(cells) - 1} comparisons with FedAvg {counted} |" in page
    for side, words_of in (("ahead", "Ahead of"), ("behind", "Behind")):
        rules = [rule for rule, row in cells.items() if row["difference"] and side_of(row) == side]
        assert f"- **{words_of} FedAvg**, by the interval: {', '.join(rules)}. " in page
    sure = sorted(rule for rule, row in cells.items() if row["p_holm"] and float(row["p_holm"]) < 0.05)
    assert f"{len(sure)} of these differences keep a p-value below 0.05: {', '.join(sure)}." in page
    at_ends = sum(bool(row["at_edge"]) for row in cells.values())
    rates = sum("model.optimizer.lr" in row["at_edge"] or "aggregator.lr" in row["at_edge"] for row in cells.values())
    assert f"one of four; {rates} of the {len(cells)} rules chose one at an end of its grid." in page
    assert f"that makes {at_ends} of the {len(cells)} rules, marked" in page


def test_a_longer_step_alone_has_the_numbers_of_its_table() -> None:
    table = csv.DictReader((RESULTS / "rivals/longer/table.csv").open())
    rows = {(row["rule"], float(row["server rate"])): row for row in table if row["metric"] == TEST}
    part = (RESULTS / "rivals.md").read_text().partition("## A longer step alone")[2].partition("\n## ")[0]
    told = re.findall(
        rf"^\| (FedAvg|GMA) \| (\d) \| ([\d.]+) ± ([\d.]+) \| (?:({NUMBER}) \(({NUMBER}) to ({NUMBER})\))?", part, re.M
    )
    assert {(rule, float(rate)) for rule, rate, *_ in told} == rows.keys()
    for rule, rate, mean, std, *difference in told:
        row = rows[rule, float(rate)]
        assert is_rounded((mean, std), [row["mean"], row["std"]], 100)
        assert not any(difference) or is_rounded(
            tuple(difference), [row[n] for n in ("difference", "t_low", "t_high")], 100
        )
    gain, loss = (100 * float(rows[key]["difference"]) for key in (("FedAvg", 2.0), ("GMA", 1.0)))
    page = " ".join((RESULTS / "rivals.md").read_text().split())
    assert f"**A longer step alone gains {gain:.1f} points**" in page
    now = 100 * float(rivals_of("digits", TEST)["GMA"]["difference"])
    assert f"it is {-loss:.2f} where both have a rate of 1, and {-now:.2f} at their own rates." in page


SHUFFLED = [
    ("No mean gain is above {:.1f} points", ["FedOMG"]),
    ("FedOMG by {:.1f} points, FedACG, FedAdam and SCAFFOLD by {:.1f} to {:.1f}.", ["FedOMG", "SCAFFOLD", "FedACG"]),
    ("Median is level, Bulyan and SignMajority lose {:.1f} and {:.1f} points", ["Bulyan", "SignMajority"]),
    (
        "AFL loses {:.1f} points, FedDG-GA {:.1f}, FedFV {:.1f}, QFedAvg {:.1f}, TERM {:.1f}.",
        ["AFL", "FedDG-GA", "FedFV", "QFedAvg", "TERM"],
    ),
    ("AFL {:.1f} points with shuffled labels, FedDG-GA {:.1f}, FedFV {:.1f}.", ["AFL", "FedDG-GA", "FedFV"]),
    ("the AND-mask {:.1f}, both at a server rate of 4", ["AND-mask"]),
    ("FedGaLA was to be behind by a point or more, and is {:.2f} behind.", ["FedGaLA"]),
]


@pytest.mark.parametrize(
    ("study", "metric", "rules", "words"),
    [
        ("signatures 5", WRONG, ("GMA", "FedAvg at GMA's progress"), "at its progress, {:.2f} ({:.2f} to {:.2f})."),
        ("signatures 1", WRONG, ("GMA", "FedAvg at GMA's progress"), "progress by {:.2f} ({:+.2f} to {:+.2f}) and"),
        ("signatures 2", WRONG, ("GMA", "FedAvg at GMA's progress"), "and {:.2f} ({:+.2f} to {:+.2f}) (3 or more)"),
        ("digits", TEST, ("FedAvg at GMA's progress", "GMA"), "it is {:.2f} ahead ({:+.2f} to {:+.2f})."),
        ("new_colours", "val/acc", ("SCAFFOLD", "FedACG"), "are alike ({:.2f}, {:.2f} to {:+.2f});"),
        ("new_colours", NEW, ("SCAFFOLD", "FedACG"), "is {:.1f} points better ({:+.1f} to {:+.1f}, not adjusted)"),
    ],
)
def test_two_rivals_are_compared_by_seed(study: str, metric: str, rules: tuple[str, str], words: str) -> None:
    study, _, shared = study.partition(" ")
    with (RESULTS / "rivals" / study / "results.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("shared by", "") == shared]
    one, other = ([100 * float(row[f"{metric} last 10"]) for row in rows if row["rule"] == rule] for rule in rules)
    low, high = stats.ttest_rel(one, other).confidence_interval()
    told = words.format(fmean(one) - fmean(other), low, high).replace("-", "−")
    assert told in " ".join((RESULTS / "rivals.md").read_text().split())


SIGNATURES = [
    ("GMA is ahead of FedAvg by {:.1f} and {:.1f} points (5 or more)", "GMA/FedAvg 1", "GMA/FedAvg 2"),
    ("It is {:.1f} and {:.1f} points behind GMA, and", "MagnitudeAgreement/GMA 1", "MagnitudeAgreement/GMA 2"),
    ("GMA, and {:.2f} and {:.2f} behind FedAvg.", "MagnitudeAgreement/FedAvg 1", "MagnitudeAgreement/FedAvg 2"),
    ("first by its mean, {:.2f} points before Median", "AND-mask/Median 1"),
    ("first by its mean, {:.2f} points before Median", "AND-mask/Median 2"),
    ("Median is {:.1f} points ahead of GMA at k = 1 and {:.1f} at k = 2", "Median/GMA 1", "Median/GMA 2"),
    ("Bulyan is {:.1f} behind (the interval contains 0) and {:.1f} ahead", "Bulyan/GMA 1", "Bulyan/GMA 2"),
    (
        "At k = 5 Bulyan gains {:.1f} points, FedCM {:.1f} and Median {:.1f}; GMA,",
        *(f"{rule}/FedAvg 5" for rule in ("Bulyan", "FedCM", "Median")),
    ),
    ("FedLESAM is {:.1f} and {:.1f} behind", "FedLESAM/FedAvg 1", "FedLESAM/FedAvg 2"),
    ("it loses {:.1f} at k = 1; its gain of {:.1f} at k = 2 is", "FedGaLA/FedAvg 1", "FedGaLA/FedAvg 2"),
    ("it has +{:.1f} and −{:.1f}.", "DeltaSGD/FedAvg 1", "DeltaSGD/FedAvg 2"),
    ("FedACG and FedAdam {:.0f} and {:.0f} points, FedAvgM", "FedACG/FedAvg 1", "FedACG/FedAvg 2"),
    ("FedACG and FedAdam {:.0f} and {:.0f} points, FedAvgM", "FedAdam/FedAvg 1", "FedAdam/FedAvg 2"),
    ("FedAvgM {:.0f} and {:.0f}. At k = 5 FedACG and", "FedAvgM/FedAvg 1", "FedAvgM/FedAvg 2"),
    (
        "FedACG and FedAdam gain {:.0f} and {:.0f}, and FedAvgM loses {:.0f}.",
        *(f"{rule}/FedAvg 5" for rule in ("FedACG", "FedAdam", "FedAvgM")),
    ),
    ("on signatures at k = 1, by {:.2f}, and", "AFL/FedAvg 1"),
]


@pytest.mark.parametrize(("sentence", "pairs"), [(sentence, pairs) for sentence, *pairs in SIGNATURES])
def test_sentences_on_signatures_have_the_numbers_of_the_table(sentence: str, pairs: list[str]) -> None:
    numbers = []
    for pair in pairs:
        rules, k = pair.rsplit(" ", 1)
        one, other = (100 * float(rivals_of("signatures", WRONG, k)[rule]["mean"]) for rule in rules.split("/"))
        numbers.append(abs(one - other))
    assert sentence.format(*numbers) in " ".join((RESULTS / "rivals.md").read_text().split())


def test_words_on_signatures_follow_from_the_table() -> None:
    cells = {k: rivals_of("signatures", WRONG, k) for k in "125"}
    for k in "12":
        means = {rule: float(row["mean"]) for rule, row in cells[k].items()}
        assert max(means, key=means.__getitem__) == "AND-mask"
        for rule in ("GMA", "AND-mask", "SAND-mask", "Median", "Bulyan"):
            assert float(cells[k][rule]["p_holm"]) <= 0.003
        assert all(abs(means[rule] - means["FedAvg"]) < 0.01 for rule in ("FedLWS", "FedAWA"))
        assert abs(means["DeltaSGD"] - means["FedAvg"]) < 0.02
    assert len(cells["1"]) == 35
    assert sum("model.optimizer.lr largest" in row["at_edge"] for row in cells["1"].values()) == 28
    own = {k: rivals_of("signatures", "test/acc/own", k) for k in "12"}
    percent = [f"{100 * float(own[k][rule]['mean']):.1f}" for rule in ("GMA", "Median", "FedAvg") for k in "12"]
    page = " ".join((RESULTS / "rivals.md").read_text().split())
    told = "GMA is at {} and {} % for k = 1 and 2, Median at {} and {}, FedAvg at {} and {} %."
    assert told.format(*percent) in page
    rules = ("GMA", "AND-mask", "FedAvg")
    with (RESULTS / "rivals/signatures/results.csv").open() as file:
        rates = {row["rule"]: row["chosen aggregator.lr"] for row in csv.DictReader(file)}
    assert {rates[rule] for rule in rules} == {"2.0"}
    when = " ".join((RESULTS / "mask/when.md").read_text().split())
    gap = {
        (rule, k): 100 * (float(cells[k][rule]["mean"]) - float(cells[k]["GMA"]["mean"]))
        for rule in ("Median", "Bulyan")
        for k in "125"
    }
    assert max(abs(gap["Median", "1"]), abs(gap["Bulyan", "1"])) < 0.5
    ahead = [gap[rule, k] for k in "25" for rule in ("Median", "Bulyan")]
    assert "{:.1f} and {:.1f} ahead of it at k = 2, and {:.1f} and {:.1f} at k = 5.".format(*ahead) in when
    gains = [100 * float(cells[k][rule]["difference"]) for k in "12" for rule in ("FedAvg at GMA's progress", "GMA")]
    assert "{:.1f} of {:.1f} points at k = 1, {:.1f} of {:.1f} at k = 2.".format(*gains) in when
    lost = [
        100 * (float(table["FedAvg"]["mean"]) - float(table["SignMajority"]["mean"]))
        for table in (cells["1"], rivals_of("signatures", "test/acc/none", "1"))
    ]
    assert "Of SignMajority's {:.0f} points at k = 1, {:.0f} are lost without any".format(*lost) in page
    signs = {"GMA", "AND-mask", "SAND-mask", "Median", "Bulyan"}
    for k, low, high in (("1", 6, 8), ("2", 15, 18)):
        gains = {rule: 100 * float(row["difference"]) for rule, row in cells[k].items() if row["difference"]}
        assert all(low < gains[rule] < high for rule in signs)
        assert max(gains[rule] for rule in gains.keys() - signs) < 5


def test_what_rates_do_to_gmas_lead_on_signatures_is_that_of_the_trials() -> None:
    with (RESULTS / "rivals/signatures/tuning.csv").open() as file:
        trials = [row for row in csv.DictReader(file) if row["stage"] == "1"]
    found: dict[str, dict[tuple[str, str], float]] = {"FedAvg": {}, "GMA": {}}
    for row in trials:
        rates = row["chosen model.optimizer.lr"], row["chosen aggregator.lr"]
        found.setdefault(row["rule"], {})[rates] = 100 * float(row[f"value {WRONG} best, not to choose by"])
    plain, masked, chosen = found["FedAvg"], found["GMA"], ("0.1", "2.0")
    page = " ".join((RESULTS / "rivals.md").read_text().split())
    assert f"FedAvg has {plain[chosen]:.1f} % on wrong" in page
    assert f"at its rates and {max(plain.values()):.1f} % at others; GMA has {masked[chosen]:.1f} % at its own." in page
    lead, left = masked[chosen] - plain[chosen], max(masked.values()) - max(plain.values())
    assert f"So of GMA's lead of {lead:.1f} there, {left:.1f} is left." in page


@pytest.mark.parametrize("study", ["fashionmnist", "one_class", "new_colours"])
def test_where_server_rates_end_at_1_it_is_said_who_took_it(study: str) -> None:
    cells = rivals_of(study, NEW if study == "new_colours" else TEST)
    assert all("aggregator.lr largest" in cells[rule]["at_edge"] for rule in ("FedAvg", "GMA", "AND-mask"))
    page = " ".join((RESULTS / "rivals.md").read_text().split())
    assert page.count("FedAvg, GMA and the AND-mask took the largest server rate offered, 1.") == 3


@pytest.mark.parametrize(("sentence", "rules"), SHUFFLED)
def test_sentences_on_shuffled_labels_have_the_numbers_of_the_table(sentence: str, rules: list[str]) -> None:
    cells = rivals_of("shuffled", TEST)
    page = " ".join((RESULTS / "rivals.md").read_text().split())
    assert sentence.format(*(abs(100 * float(cells[rule]["difference"])) for rule in rules)) in page


def test_words_on_shuffled_labels_follow_from_the_table() -> None:
    cells = rivals_of("shuffled", TEST)
    words = {rule: row["here"] for rule, row in cells.items()}
    assert [rule for rule, word in words.items() if word == "ahead"] == ["FedOMG", "FedACG", "FedAdam", "SCAFFOLD"]
    less = [rule for rule, word in words.items() if word == "ahead by less than g"]
    assert less == ["CGW", "FedAWA", "FedAvgM", "DeltaSGD"]
    sure = {rule for rule, row in cells.items() if row["p_holm"] and float(row["p_holm"]) < 0.05}
    assert sure == {"AFL", "FedDG-GA", "FedFV", "QFedAvg", "TIES", "AND-mask"}
    level = {"MagnitudeAgreement", "FedAvg at GMA's progress", "Median", "FedLWS"}
    assert {words[rule] for rule in level} == {"level"}
    assert {words[rule] for rule in ("FedLESAM", "SAND-mask")} == {"undecided"}
    assert -0.55 < 100 * float(cells["GMA"]["difference"]) < -0.45
    assert sum("model.optimizer.lr largest" in row["at_edge"] for row in cells.values()) == 24
    high = {rule for rule, row in cells.items() if "aggregator.lr largest" in row["at_edge"]}
    controls = {"FedAvg at GMA's progress", "FedAvg at GMA's length"}
    assert len(high) == 9
    assert high > controls | {"GMA", "AND-mask", "MagnitudeAgreement"}
    with (RESULTS / "rivals/shuffled/tuning.csv").open() as file:
        trials = [row for row in csv.DictReader(file) if row["stage"] == "1"]
    best = dict[tuple[str, str, str], float]()
    for row in trials:
        key = (row["rule"], row["chosen model.optimizer.lr"], row["chosen aggregator.lr"])
        best[key] = 100 * float(row["value val/acc last 10"])
    assert [round(best["FedAvg", one, other], 1) for one, other in (("0.05", "1.0"), ("0.1", "2.0"))] == [80.9, 83.9]
    assert round(max(value for (rule, *_), value in best.items() if rule == "FedACG"), 1) == 84.1
    with gzip.open(RESULTS / "rivals/shuffled/curves.csv.gz", "rt") as file:
        late = [
            100 * float(row[TEST])
            for row in csv.DictReader(file)
            if row["rule"] == "FedLESAM" and int(row["round"]) > 49 and row[TEST]
        ]
    assert (round(min(late)), round(max(late))) == (71, 93)
