"""Figures of docs/results/mask/when.md that no table has are those of its curves."""

import csv
import gzip
import re
from collections import defaultdict
from functools import cache
from statistics import fmean

import numpy as np
import pytest
from scipy.stats import binom, t

from docs.dose_figure import CLIENTS, DOSE, SIGNATURES, reliance
from docs.votes_figure import boundary, mixture
from tests.docs.test_results import NUMBER, is_rounded

PAGE = SIGNATURES.parent / "when.md"
Seeds = list[dict[int, float]]


def text_of_page() -> str:
    return " ".join(PAGE.read_text().split())


@cache
def rows_of(study: str) -> list[dict[str, str]]:
    with gzip.open(PAGE.parent / study / "curves.csv.gz", "rt") as file:
        return sorted(csv.DictReader(file), key=lambda row: int(row["seed"]))


def curves(study: str, cell: dict[str, str], metric: str = "test/acc") -> Seeds:
    """The curve of each seed of a cell, in percent."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows_of(study):
        if cell.items() <= row.items() and row[metric]:
            found[row["seed"]][int(row["round"])] = 100 * float(row[metric])
    return [*found.values()]


def interval(ours: list[float], theirs: list[float]) -> list[float]:
    """Mean and 95 % interval of differences that are paired by seed."""
    less = np.subtract(ours, theirs)
    half = t.ppf(0.975, len(less) - 1) * less.std(ddof=1) / len(less) ** 0.5
    return [float(one) for one in (less.mean(), less.mean() - half, less.mean() + half)]


def late(of: Seeds, first: int) -> list[float]:
    return [fmean(value for at, value in curve.items() if at >= first) for curve in of]


def difference(study: str, cell: dict[str, str], rules: tuple[str, str], metric: str, first: int) -> list[float]:
    return interval(*(late(curves(study, cell | {"rule": rule}, metric), first) for rule in rules))


def mean_of(of: Seeds) -> dict[int, float]:
    return {at: fmean(curve[at] for curve in of) for at in of[0]}


def test_how_slow_gma_learns_a_signature() -> None:
    allowed = (60, 120)
    reached = []
    for shared, bound in zip((1, 2), allowed, strict=True):
        means = {rule: {r: fmean(v) for r, v in curve.items()} for rule, curve in reliance(DOSE, shared).items()}
        fedavg = means["FedAvg"]
        reached.append(float(np.interp(means["GMA"][600], [*fedavg.values()], [*fedavg])))
        assert bound == 600 * shared / CLIENTS
    said = "as FedAvg did at round {:.0f} (k = 1) and {:.0f} (k = 2), where the bound allows rounds {} and {}."
    assert said.format(*reached, *allowed) in text_of_page()


def test_what_a_step_of_gmas_progress_has_of_its_gain() -> None:
    for shared, (early, end) in {"1": (0.40, 0.12), "2": (0.39, 0.14)}.items():
        cell = {"client rate": "0.05", "other blocks": "dark", "shared by": shared}
        arms = [mean_of(curves("dose", cell | {"rule": r}, "test/acc/wrong")) for r in ("FedAvg", PROGRESS, "GMA")]
        for rounds, share in ((range(41, 61), early), (range(581, 601), end)):
            fedavg, step, gma = (fmean(v for at, v in arm.items() if at in rounds) for arm in arms)
            assert (step - fedavg) / (gma - fedavg) == pytest.approx(share, abs=0.005)
    assert "a step of GMA's progress gives two fifths in rounds 41 to 60, and a seventh or less after" in text_of_page()
    assert max(0.12, 0.14) < 1 / 7 + 0.005


PROGRESS = "FedAvg at GMA's progress"


def test_what_the_mask_costs_on_the_right_signature() -> None:
    dark = {"client rate": "0.05", "other blocks": "dark"}
    words: list[str] = []
    for rule in ("GMA", "AND-mask"):
        for study, cell, first in (("signatures", {"other blocks": "dark"}, 51), ("dose", dark, 581)):
            for k in "12":
                lost = -difference(study, cell | {"shared by": k}, (rule, "FedAvg"), "test/acc/own", first)[0]
                words.append(f"{lost:.2f}")
    page = text_of_page()
    assert (
        "GMA is behind by {} points at k = 1 and {} at k = 2 in rounds 51 to 60, and by {} and {} after 600;".format(
            *words[:4]
        )
        in page
    )
    assert "the AND-mask by {} and {}, and then by {} and {}.".format(*words[4:]) in page
    gains = [
        difference(
            "signatures", {"other blocks": "lit at random", "shared by": k}, ("GMA", "FedAvg"), "test/acc/own", 51
        )[0]
        for k in "125"
    ]
    assert [round(gain, 1) for gain in gains] == [0.3, 0.1, -0.6]
    assert "With blocks lit at random it gains 0.3 and 0.1 there, and loses 0.6 at k = 5." in page


def test_with_100_clients_gma_is_behind_at_first() -> None:
    fedavg, gma = (mean_of(curves("noise", {"clients": "100", "rule": rule})) for rule in ("FedAvg", "GMA"))
    lead = {at: gma[at] - fedavg[at] for at in gma if at}
    assert max(at for at, value in lead.items() if value < 0) == 95
    assert round(-lead[50], 1) == 0.6
    assert round(max(fedavg.values()) - fedavg[150], 1) == 0.2
    assert gma[150] == max(gma.values())
    assert "behind FedAvg until round 95, by 0.6 points at round 50, and still rises at the end" in text_of_page()
    assert "where FedAvg has fallen by 0.2." in text_of_page()


def test_flips_by_the_best_round_and_at_the_end() -> None:
    arms = {
        "GMA": "By each run's best round GMA gains {} ({} to {})",
        "GMA, threshold 0.2": "with τ = 0.2 {} ({} to {})",
        "GMA at FedAvg's length": "its direction at FedAvg's length {} ({} to {})",
        "FedAvg at GMA's length": "and its length alone {} ({} to {})",
    }
    best = {
        r: [max(curve.values()) for curve in curves("flips", {"flipped": "0.4", "rule": r})] for r in (*arms, "FedAvg")
    }
    for rule, sentence in arms.items():
        match = re.search(re.escape(sentence).replace(r"\{\}", f"({NUMBER})"), text_of_page())
        assert match, sentence
        assert is_rounded(match.groups(), [repr(one) for one in interval(best[rule], best["FedAvg"])], 1), rule
    means = [mean_of(curves("flips", {"flipped": "0.2", "rule": rule})) for rule in best]
    rises = [mean[150] - mean[120] for mean in means]
    assert (round(min(rises), 1), round(max(rises), 1)) == (0.4, 0.6)
    assert "With 20 % all rules still rise by 0.4 to 0.6 points in the last 30 rounds." in text_of_page()


def wrong(shared: int, rule: str, at: int) -> float:
    """Mean accuracy with a wrong signature, other blocks dark, in percent."""
    with gzip.open(SIGNATURES / "curves.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    cell = {"other blocks": "dark", "shared by": str(shared), "rule": rule, "round": str(at)}
    return fmean(100 * float(row["test/acc/wrong"]) for row in rows if cell.items() <= row.items())


def test_soft_masks_delay_and_binary_masks_stop() -> None:
    lines = re.findall(
        r"^\| ([12]) \| (\d0) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| \+([\d.]+) \|$", PAGE.read_text(), re.M
    )
    assert len(lines) == 6
    for k, round_, *words in lines:
        shared, at = int(k), int(round_)
        means = {
            rule: {r: fmean(seeds) for r, seeds in curve.items()}
            for rule, curve in reliance(SIGNATURES, shared).items()
        }
        bound = np.interp(at * shared / CLIENTS, [*means["FedAvg"]], [*means["FedAvg"].values()])
        lead = wrong(shared, "AND-mask", at) - wrong(shared, "GMA", at)
        exact = [means["FedAvg"][at], means["GMA"][at], bound, means["AND-mask"][at], lead]
        assert [float(word) for word in words] == pytest.approx(exact, abs=0.0501), (k, at)
        assert means["GMA"][at] < bound
        assert means["AND-mask"][at] < 0.2


def test_what_noise_leaves_is_that_of_theory() -> None:
    text = PAGE.read_text()
    lines = re.findall(r"^\| (\d+) \| (\d+) % \| (\d+) % \| ([\d.]+) \| ([\d.]+) \|$", text, re.M)
    assert len(lines) == 3
    for clients, *words in lines:
        n = int(clients)
        below = [100 * (1 - 2 * binom.cdf(n * (1 - tau) / 2 + 1e-9, n, 0.5)) for tau in (0.2, 0.4)]
        assert [float(word) for word in words[:2]] == pytest.approx(below, abs=0.5)
        assert [float(word) for word in words[2:]] == pytest.approx(
            [mixture(n, tau).progress for tau in (0.2, 0.4)], abs=0.005
        )
    few, many = ((boundary(n, 0.4), 1 / mixture(n, 0.4).length) for n in (10, 100))
    said = (
        f"falls from {few[0]:.2f} to {many[0]:.2f}, and the most that it can gain in the step's signal-to-noise rises"
    )
    assert f"{said} from {few[1]:.2f} to {many[1]:.2f}." in " ".join(text.split())


def test_reliance_over_600_rounds_is_bounded_as_predicted() -> None:
    text, allowed = PAGE.read_text(), []
    tables = re.split(r"^\| [125] (?=\| FedAvg \|)", text.partition("### Over 600 rounds")[2], flags=re.M)[1:4]
    for shared, rows in zip((1, 2, 5), tables, strict=True):
        means = {rule: {r: fmean(v) for r, v in curve.items()} for rule, curve in reliance(DOSE, shared).items()}
        for rule, curve in means.items():
            cells = re.search(rf"^\|? ?\| {re.escape(rule)} \|(?: [\d.]+ ± [\d.]+ \|){{3}} ([\d.]+) \|", rows, re.M)
            assert cells is not None, (shared, rule)
            assert float(cells[1]) == pytest.approx(fmean(curve[at] for at in (590, 600)), abs=0.0501), (shared, rule)
        if shared == 5:  # the vote passes
            assert all(means["GMA"][at] > value for at, value in means["FedAvg"].items() if at >= 50)
            continue
        later = {at: value for at, value in means["GMA"].items() if at >= (50 if shared == 1 else 10)}
        assert all(value < 0.3 for at, value in means["GMA"].items() if at < min(later))
        slowed = {at: np.interp(at * shared / CLIENTS, *zip(*means["FedAvg"].items(), strict=True)) for at in later}
        assert all(later[at] < slowed[at] for at in later)
        assert f" {means['GMA'][200]:.1f}, {means['GMA'][600]:.1f}" in text
        assert f"{max(value for at, value in means['AND-mask'].items()):.1f}" == "0.2"
        allowed.append(f"{slowed[600]:.1f}")
    assert f"{allowed[1]} and {allowed[0]} points" in text


def test_twice_the_rate_is_not_quite_twice_the_rounds() -> None:
    fast, slow = reliance(DOSE, 2, "0.1"), reliance(DOSE, 2)
    said = re.search(
        r"\| ([\d.]+) for ([\d.]+), (\S+) \((\S+) to (\S+)\): not quite; FedAvg's (\S+) for (\S+) \|", PAGE.read_text()
    )
    assert said is not None
    less = np.subtract(fast["GMA"][300], slow["GMA"][600])
    half = t.ppf(0.975, 4) * less.std(ddof=1) / 5**0.5
    exact = [fmean(fast["GMA"][300]), fmean(slow["GMA"][600]), less.mean(), less.mean() - half, less.mean() + half]
    exact += [fmean(fast["FedAvg"][300]), fmean(slow["FedAvg"][600])]
    told = [float(word.replace("−", "-")) for word in said.groups()]
    assert told[:2] + told[5:] == pytest.approx(exact[:2] + exact[5:], abs=0.0501)
    assert told[2:5] == pytest.approx(exact[2:5], abs=0.00501)


def test_at_rate_01_the_order_of_the_rules_is_the_same() -> None:
    table = csv.DictReader((PAGE.parent / "dose/table.csv").open())
    cell = {"client rate": "0.1", "shared by": "2", "metric": "test/acc/wrong", "statistic": "rounds 581-600"}
    rows = {row["rule"]: row for row in table if cell.items() <= row.items()}
    told = "GMA has {}, the AND-mask {}, Median {} and FedAvg at GMA's progress {}, less than a tenth of GMA's lead"
    names = ("GMA", "AND-mask", "Median", "FedAvg at GMA's progress")
    parts = []
    for name in names:
        mean, low, high = (100 * float(rows[name][column]) for column in ("difference", "t_low", "t_high"))
        parts.append(f"{mean:+.2f} ({low:+.2f} to {high:+.2f})")
    assert told.format(*parts) in text_of_page()
    assert 10 * float(rows[names[3]]["difference"]) < float(rows["GMA"]["difference"])


def test_whether_the_lead_wears_off_in_600_rounds() -> None:
    cells = [{"client rate": "0.05", "other blocks": "dark", "shared by": k} for k in "12"]
    changes = [
        [
            interval(late(of, 581), [fmean(v for at, v in curve.items() if 41 <= at <= 60) for curve in of])
            for of in (curves("dose", cell | {"rule": rule}, "test/acc/wrong") for rule in ("GMA", "FedAvg"))
        ]
        for cell in cells
    ]
    match = re.search(
        rf"still rises, by ({NUMBER}) \(({NUMBER}) to ({NUMBER})\) from rounds 41 to 60 on", text_of_page()
    )
    assert match
    assert is_rounded(match.groups(), [repr(one) for one in changes[0][0]], 1)
    falls = (-change[0] for change in changes[1])
    assert "at k = 2 it falls by {:.1f} points and FedAvg's by {:.1f}.".format(*falls) in text_of_page()


def test_images_without_a_signature_where_all_vote() -> None:
    cell = {"client rate": "0.05", "other blocks": "lit at random", "shared by": "5"}
    arms = [late(curves("dose", cell | {"rule": rule}, "test/acc/none"), 581) for rule in ("FedAvg", "GMA")]
    said = "of images without one FedAvg tells {:.1f} %, GMA {:.1f} %.".format(*map(fmean, arms))
    assert said in text_of_page()


def test_colours_instead_of_signatures() -> None:
    new, page = "test/acc/new_scheme", text_of_page()
    for rules, sentence in (
        (("GMA", PROGRESS), "GMA less FedAvg at its progress is {} ({} to {}). FedAvg has"),
        (("AND-mask", "GMA"), "which came out, {} ({} to {}) by its mean"),
    ):
        match = re.search(re.escape(sentence).replace(r"\{\}", f"({NUMBER})"), page)
        assert match, sentence
        exact = difference("dose_images", {"shared by": "2"}, rules, new, 361)
        assert is_rounded(match.groups(), [repr(one) for one in exact], 1), sentence
    fedavg = {"shared by": "2", "rule": "FedAvg"}
    unknown, known = (late(curves("dose_images", fedavg, metric), 361) for metric in (new, "test/acc/seen_schemes"))
    assert f"FedAvg has {min(unknown):.0f} to {max(unknown):.0f} % by seed" in page
    assert f"predicted at 8 to 25 points, is {fmean(known) - fmean(unknown):.0f}." in page
    with (PAGE.parent / "dose_images" / "table.csv").open() as file:
        (row,) = (
            row
            for row in csv.DictReader(file)
            if (row["metric"], row["rule"], row["statistic"]) == (new, "GMA", "rounds 361-400")
        )
    able = (
        f"a gain of {100 * float(row['visible_gain']):.0f} points with 80 % power, and {row['seeds_needed']} would see"
    )
    assert able in page
