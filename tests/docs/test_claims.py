"""The words on the papers' claims are those of the protocol, recomputed from the committed curves."""

import csv
import gzip
import math
import re
from collections import Counter, defaultdict
from functools import cache
from statistics import fmean, stdev

import pytest
import yaml
from scipy import stats

from tests.docs.test_results import NUMBER, PRINTED, RESULTS, WORDS, is_rounded, seen


def test_the_index_is_a_screen() -> None:
    lines = (RESULTS / "index.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    assert len(lines) <= 60
    assert len(rows) - 2 == len({page for *_, page in index_rows().values() if page})


# Rows of the index that no table holds: older runs, and what was not run.
OLD = "undecided (older)"
OLDER = {
    "Table 2, FashionMNIST, 2 classes, 200 rounds: the mask gains °": OLD,
    "Table 2, FashionMNIST, 2 classes, 200 rounds: FedAdam is ahead of FedAvg °": OLD,
    "Table 1 (there FEMNIST, here FashionMNIST), α = 0.2, rounds 171 to 200: the correction gains °": OLD,
    "Table 1, EMNIST, one class per client, 600 communication rounds: FedGA gains over FedAvg °": OLD,
    "Tables 2, 3 and 6 on CIFAR, FEMNIST and other numbers of clients; Table 7; Figure 2": "not run",
    "α of 0.1 and 0.3, rounds 901 to 1,000": "not run",
    "Table 1, CIFAR-10 and EMNIST at full size; Figures 2 and 5 to 7; Figure 8 on CIFAR-100": "not run",
}
Curves = list[dict[int, float]]


def index_rows() -> dict[str, tuple[str, ...]]:
    """Ours, the word on it, the paper's, power, verdict and page by claim, as the page of all claims prints them."""
    lines = (RESULTS / "claims.md").read_text().partition("| claim |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")] for line in lines]
    return {claim: tuple(others) for claim, *others in cells if any(others)}


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


def has_settled(of: Curves, within: float) -> bool:
    at = sorted(set.intersection(*map(set, of)))
    ends, starts = ([c[r] for c in of for r in at if at[-1] * (1 - a) < r <= at[-1] * (1 - b)] for a, b in TENTHS)
    return bool(ends and starts) and abs(fmean(ends) - fmean(starts)) <= within


TENTHS = ((0.1, 0.0), (0.2, 0.1))


@cache
def rates_of(folder: str) -> frozenset[str]:
    """The seeds of a study that chose rates."""
    path = RESULTS / folder / "results.csv"
    rows = list(csv.DictReader(path.open())) if path.is_file() else []
    study = (
        yaml.safe_load((RESULTS.parents[1] / "configs" / "studies" / f"{rows[0]['study']}.yaml").read_text())
        if rows
        else {}
    )
    chosen = {row["seed"] for row in rows if any(cell for name, cell in row.items() if name.startswith("chosen "))}
    return frozenset(chosen & set(map(str, study.get("tune", {}).get("seeds", [0]))))


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


def recomputed(row: dict[str, str]) -> tuple[tuple[float, float, float], float | None, str, str]:
    """Difference and interval, the paper's gain, the word on ours and the verdict, by the protocol from curves."""
    metric, ours = row["metric"], axes_of(row["ours"])
    if " pooled" in row["ours"]:
        return recomputed_pool(row)
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
    base = fmean(values[1])
    mean, edge = interval_of(differences)
    figures = published(row)
    gain = figures[0] - figures[1] if figures else None
    direction = (-1 if row["sign"].startswith("-") else 1) if gain is None else math.copysign(1, gain)
    least = abs(gain) if gain is not None else abs(float(row["sign"])) if row["sign"] not in "+-" else 0.0
    scale = 1.0 if re.search("acc|agreement", metric) else abs(base)
    half = (least or 0.01 * scale) / 2
    known = bool(figures) and row["published"] != "of other data"
    level = " less " not in row["statistic"] and is_level(base - figures[1] if known else None, half, scale, sides)
    failed = [*["baseline"] * (not level), *["rates"] * bool(rates_of(row["folder"]))]
    ends = mean - edge, mean + edge
    if row["gate"] and base < float(row["gate"]):
        return (mean, *ends), gain, "nothing learned", ""
    own = row["claim"].startswith("(our question)")
    less = re.search("loss|distance", metric) or (row["folder"] == "gma/membership")
    better = direction if own or re.search("agreement", metric) else -1 if less else 1
    here = said(sorted(better * end for end in ends), least)
    verdict = verdict_on(sorted(direction * end for end in ends), least, failed)
    return (mean, *ends), gain, here, "" if own else verdict


def interval_of(differences: list[float]) -> tuple[float, float]:
    """The mean of paired differences and the half-width of its 95 % interval."""
    n = len(differences)
    return fmean(differences), float(stats.t.ppf(0.975, n - 1)) * stdev(differences) / n**0.5


def recomputed_pool(row: dict[str, str]) -> tuple[tuple[float, float, float], float | None, str, str]:
    """The same of a pooled row, which passes the gates that all its cells pass."""
    ours, theirs, gain, level = pooled_values(row)
    mean, edge = interval_of([a - b for a, b in zip(ours, theirs, strict=True)])
    own = row["claim"].startswith("(our question)")
    here = said([mean - edge, mean + edge], gain)
    failed = [*["baseline"] * (not level), *["rates"] * bool(rates_of(row["folder"]))]
    verdict = "" if own else verdict_on([mean - edge, mean + edge], gain, failed)
    return (mean, mean - edge, mean + edge), None if own else gain, here, verdict


def verdict_on(ends: list[float], gain: float, failed: list[str]) -> str:
    """What an interval says of a claimed gain, above 0, that passes all gates but some."""
    word = "reproduced" if ends[0] > 0 else "contradicted" if ends[1] < gain else ""
    return word if word and not failed else f"undecided ({', '.join(failed) if word else 'seeds'})"


def is_level(apart: float | None, half: float, scale: float, sides: list[Curves]) -> bool:
    """Whether a baseline is the paper's to half the gain, or the same plateau, flat to that, under both methods."""
    plateau = abs(apart or 0.0) <= 0.03 * scale and all(has_settled(side, half) for side in sides)
    return plateau or (apart is not None and abs(apart) <= half)


def test_the_pooled_row_of_table_2_over_the_last_half_of_the_rounds() -> None:
    row = claimed_rows()["Table 2, IID, all 10 cells pooled: the mask gains"]
    *best, gain, _ = pooled_values(row)
    *half, _, _ = pooled_values(row | {"statistic": "rounds 16-30"})
    page = " ".join((RESULTS / "gma/rules.md").read_text().split())
    for (ours, theirs), sentence in (
        (best, "The mean over the ten IID cells that the paper has is"),
        (half, "over the last half of the rounds (`last 50 %`) the same row has"),
    ):
        differences = [a - b for a, b in zip(ours, theirs, strict=True)]
        mean, edge = interval_of(differences)
        match = re.search(rf"{re.escape(sentence)} ({NUMBER}) \(({NUMBER}) to ({NUMBER})\).*? power of (0\.\d+)", page)
        assert match
        assert is_rounded(match.groups()[:3], [repr(one) for one in (mean, mean - edge, mean + edge)], 100)
        assert float(match[4]) == pytest.approx(seen(gain, stdev(differences), len(differences)), abs=0.005)


def test_the_mask_is_ahead_early_on_mnist_iid() -> None:
    page = " ".join((RESULTS / "gma/rules.md").read_text().split())
    sides = [curves("gma/table2_iid", {"data": "MNIST", "aggregation": rule}, "test/acc") for rule in ("GMA", "AVG")]
    match = re.search(
        "by {n} at round 30 and {n} at round 50".format(n=rf"({NUMBER}) \(({NUMBER}) to ({NUMBER})\)"), page
    )
    assert match
    for at, numbers in ((30, match.groups()[:3]), (50, match.groups()[3:])):
        mean, edge = interval_of([ours[at] - theirs[at] for ours, theirs in zip(*sides, strict=True)])
        assert is_rounded(numbers, [repr(one) for one in (mean, mean - edge, mean + edge)], 100), at
    gma, fedavg = (
        [
            fmean(curve[at] for curve in curves("gma/table2_iid", {"data": "FMNIST", "aggregation": rule}, "test/acc"))
            for at in range(5, 201, 5)
        ]
        for rule in ("GMA", "AVG")
    )
    behind = sum(ours < theirs for ours, theirs in zip(gma, fedavg, strict=True))
    assert f"On FashionMNIST its mean is behind in {behind} of {len(gma)} tests." in page


def said(ends: list[float], g: float) -> str:
    """What an interval says of a gain of interest."""
    if ends[1] < 0:
        return "behind"
    if ends[0] > 0:
        return "ahead" if ends[1] >= g else "ahead by less than g"
    return "level" if -g < ends[0] and ends[1] < g else "undecided"


def pooled_values(row: dict[str, str]) -> tuple[list[float], list[float], float, bool]:
    """Means over the pooled cells by seed, with the mask and without, and of the gains; whether all cells are level."""
    fixed = {name: value for name, value in axes_of(row["ours"]).items() if not value.endswith(" pooled")}
    wanted = {**fixed, "metric": row["metric"]}
    table = list(csv.DictReader((RESULTS / row["folder"] / "table.csv").open()))
    axes = [name for name in list(table[0])[: list(table[0]).index("seeds")] if name not in ("metric", "statistic")]
    cells = [one for one in table if wanted.items() <= one.items() and one["claimed"] and "pooled" not in str(one)]
    cells = [one for one in cells if one["here"] != "nothing learned"]
    assert {f"{len(cells)} pooled"} == {name for name in axes_of(row["ours"]).values() if name.endswith(" pooled")}
    values: list[list[list[float]]] = []
    sides: list[list[Curves]] = []
    for others in ({}, axes_of(row["baseline"])):
        found = [curves(row["folder"], {name: one[name] for name in axes} | others, row["metric"]) for one in cells]
        values.append([[statistic_of(curve, row["statistic"], row["metric"], {}) for curve in one] for one in found])
        sides.append(found)
    gains = [float(one["claimed"]) for one in cells]
    papers = [
        float(one["published"]) - gain if one["published"] else None for one, gain in zip(cells, gains, strict=True)
    ]
    apart = [None if paper is None else fmean(base) - paper for base, paper in zip(values[1], papers, strict=True)]
    level = [is_level(a, abs(g) / 2, 1.0, [*of]) for a, g, *of in zip(apart, gains, *sides, strict=True)]
    ours, theirs = ([fmean(of_seed) for of_seed in zip(*side, strict=True)] for side in values)
    return ours, theirs, fmean(gains), all(level)


def test_every_row_of_the_index_is_tied_to_a_study_or_listed() -> None:
    printed_rows, rows = index_rows(), claimed_rows()
    assert [claim for claim in printed_rows if not claim.startswith("**")] == [*rows]
    assert {claim: printed_rows[claim][4] for claim, row in rows.items() if not row["folder"]} == OLDER


@pytest.mark.parametrize("claim", tied())
def test_a_verdict_of_the_index_is_that_of_its_csvs(claim: str) -> None:
    row = claimed_rows()[claim]
    ours, here, paper, power, verdict, page = index_rows()[claim]
    numbers, gain, word, of_paper = recomputed(row)
    scale = 100 if re.search("acc|agreement", row["metric"]) else 1
    match = re.fullmatch(rf"({NUMBER}) \(({NUMBER}) to ({NUMBER})\)", ours)
    assert match
    assert is_rounded(match.groups(), [repr(number) for number in numbers], scale)
    assert paper == row["published"] if gain is None else is_rounded((paper,), [repr(gain)], 100)
    assert (here, verdict, page) == (word, of_paper, row["page"])
    assert bool(power) == (gain is not None)


@pytest.mark.parametrize("page", sorted({row["page"] for row in claimed_rows().values()} - {""}))
def test_the_words_of_a_page_and_of_its_row_on_the_index_are_those_of_its_claims(page: str) -> None:
    def counted(at: int, address: str) -> Counter[str]:
        return Counter(cells[at] for cells in index_rows().values() if cells[-1].endswith(address) and cells[at])

    address = page.partition("](")[2]
    line = re.search(r"^\| \*\*Verdict\*\* \| ([^:|]*)", (RESULTS / address.removesuffix(")")).read_text(), re.M)
    (row,) = (line for line in (RESULTS / "index.md").read_text().splitlines() if page in line and line[:1] == "|")
    assert line
    here, _, papers = line[1].partition("about the paper ")
    for text, expected in (
        (here.removeprefix("in our runs "), counted(1, f"({address}")),
        (papers, counted(4, f"({address}")),
        (row.split("|")[2], counted(1, page)),
        (row.split("|")[3], counted(4, page)),
    ):
        assert Counter({word: int(many) for many, word in re.findall(rf"(\d+) ({MANY})", text)}) == expected, text


MANY = rf"{WORDS}|nothing learned|not run"


@pytest.mark.parametrize("claim", tied())
def test_gates_and_gains_are_those_of_the_study(claim: str) -> None:
    row = claimed_rows()[claim]
    results = RESULTS / row["folder"] / "results.csv"
    study = next(csv.DictReader(results.open()))["study"] if results.is_file() else row["folder"]
    report = yaml.safe_load((RESULTS.parents[1] / "configs" / "studies" / f"{study}.yaml").read_text())["report"]
    first = [report["metric"]] if isinstance(report["metric"], str) else report["metric"]
    if "learned" in report and row["metric"] == first[0] and " less " not in row["statistic"]:
        assert float(row["gate"]) == report["learned"]
    if "gain" in report and (row["claim"].startswith("(our question)") or "published" not in report):
        assert float(row["sign"]) == report["gain"]


def test_how_far_gma_is_on_the_convex_case() -> None:
    page = " ".join((RESULTS / "gma/convex.md").read_text().split())
    found: dict[str, list[float]] = {}
    for split in ("IID", "non-IID"):
        sides = [
            curves("gma/convex", {"split": split, "aggregation": rule}, "per_client/acc_weighted")
            for rule in ("AVG", "GMA")
        ]
        fedavg, gma = ({at: fmean(curve[at] for curve in side) for at in side[0]} for side in sides)
        found[split] = [next(at for at in sorted(fedavg) if fedavg[at] >= gma[now]) for now in (1000, 10000)]
        gaps = [100 * (fedavg[at] - gma[at]) for at in (2000, 10000)]
    assert found == {"IID": [700, 4800], "non-IID": [700, 3400]}
    assert "after 1,000 rounds where FedAvg was after 700, in both splits" in page
    assert "after 10,000 it is where FedAvg was after 4,800 (IID) and 3,400 (two shards)" in page
    assert f"is {gaps[0]:.2f} points behind after 2,000 rounds and {gaps[1]:.2f} after 10,000" in page


def test_what_the_mask_does_from_fedavgs_model() -> None:
    page = " ".join((RESULTS / "gma/convex.md").read_text().split())
    fedavg, gma = (
        curves("gma/convex_switched", {"aggregation": rule}, "per_client/loss_weighted") for rule in ("AVG", "GMA")
    )
    pairs = [
        ([one[800] - one[400] for one in gma], "it changes by {} ({} to {}) in 400 rounds"),
        ([one[400] - one[800] for one in fedavg], "under FedAvg it falls by {} ({} to {})"),
        ([a[800] - b[800] for a, b in zip(gma, fedavg, strict=True)], "GMA less FedAvg is {} ({} to {})"),
    ]
    for differences, sentence in pairs:
        mean, edge = interval_of(differences)
        match = re.search(re.escape(sentence).replace(r"\{\}", f"({NUMBER})"), page)
        assert match
        assert is_rounded(match.groups(), [repr(one) for one in (mean, mean - edge, mean + edge)], 1), sentence


def test_what_the_mask_gains_over_its_controls_in_a_single_round_is_that_of_the_runs() -> None:
    page = (RESULTS / "gma/participation.md").read_text()
    lines = re.findall(r"^\| (\d) of 10 \| (in the round|not in it) \| ([^|]+) \| ([^|]+) \|$", page, re.M)
    assert len(lines) == 4
    for drawn, which, *cells in lines:
        metric = "per_client/acc_in" if which == "in the round" else "per_client/acc_out"
        for control, cell in zip(("its length", "its progress"), cells, strict=True):
            row = {"folder": "gma/tables4_5_trained", "metric": metric, "statistic": "final", "sign": "+", "gate": ""}
            row |= {"ours": f"clients per round={drawn};aggregation=GMA", "baseline": f"aggregation={control}"}
            numbers, *_ = recomputed({**row, "published": "none published", "claim": "(our question)"})
            (printed_ones,) = PRINTED["difference", "t_low", "t_high"].findall(cell)
            assert is_rounded(printed_ones, [repr(number) for number in numbers], 100), (drawn, which, control)


def test_what_600_rounds_leave_between_masks_is_that_of_the_runs() -> None:
    page = " ".join((RESULTS / "mask/when.md").read_text().split())
    ones, twos = ("other blocks=dark;shared by=1", "other blocks=dark;shared by=2")
    fives, lit, end = "other blocks=dark;shared by=5", "other blocks=lit at random;shared by=5", "rounds 581-600"
    lit_ones, lit_twos = ("other blocks=lit at random;shared by=1", "other blocks=lit at random;shared by=2")
    leads, median = (
        "AND-mask less GMA at the end: +2.5, at k = 2 +8.5 | ",
        "the median within 1.5 points of the AND-mask | ",
    )
    said = [
        (ones, "AND-mask", "GMA", end, leads + "{} ({} to {})"),
        (twos, "AND-mask", "GMA", end, ": less | {} ({} to {})"),
        (ones, "Median", "AND-mask", end, median + "{} ({} to {})"),
        (twos, "Median", "AND-mask", end, "(−0.57 to −0.13) | {} ({} to {})"),
        (
            twos,
            "GMA",
            "FedAvg at GMA's progress",
            end,
            "GMA less FedAvg's step of the same progress is {} points ({} to {})",
        ),
        (fives, "GMA", "FedAvg", "rounds 60-60", "within 1 point of 0, is {} ({} to {}) at round 60"),
        (fives, "GMA", "FedAvg", end, "at round 60 and {} ({} to {}) at the end"),
        (fives, "AND-mask", "GMA", end, "AND-mask less GMA is {} ({} to {}), within 1 point"),
        (fives, "Median", "AND-mask", end, "the median less the AND-mask is {} ({} to {}), above"),
        (ones, "GMA", "FedAvg at GMA's progress", end, "at k = 1 it is {} ({} to {})"),
        (lit, "AND-mask", "GMA", end, "that leads GMA by more and more: {} ({} to {}), after"),
        (lit, "AND-mask", "GMA", "rounds 60-60", "(+1.82 to +2.28), after {} ({} to {}) at round 60"),
        (lit_ones, "GMA", "FedAvg at GMA's progress", end, "GMA less that step is {} ({} to {}), "),
        (lit_twos, "GMA", "FedAvg at GMA's progress", end, "(+1.06 to +1.33), {} ({} to {}) and"),
        (lit, "GMA", "FedAvg at GMA's progress", end, "(+1.41 to +1.83) and {} ({} to {})."),
    ]
    row = {"folder": "mask/dose", "metric": "test/acc/wrong", "sign": "+", "gate": ""}
    row |= {"published": "none published", "claim": "(our question)"}
    for cell, ours, baseline, statistic, sentence in said:
        arms = {"ours": f"client rate=0.05;{cell};rule={ours}", "baseline": f"rule={baseline}"}
        numbers, *_ = recomputed({**row, **arms, "statistic": statistic})
        match = re.search(re.escape(sentence).replace(r"\{\}", f"({NUMBER})"), page)
        assert match, sentence
        assert is_rounded(match.groups(), [repr(number) for number in numbers], 100), sentence


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
