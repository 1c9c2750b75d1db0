"""Figures of docs/results/mask/when.md that no table has are those of its curves."""

import csv
import gzip
import re
from statistics import fmean

import numpy as np
import pytest
from scipy.stats import binom, t

from docs.dose_figure import CLIENTS, DOSE, SIGNATURES, reliance
from docs.votes_figure import boundary, mixture

PAGE = SIGNATURES.parent / "when.md"


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
