"""Draws what privacy costs and prevents, and what compression costs; prints the ε that attacks prove.

    python docs/privacy_figure.py

reads docs/results/privacy/ and docs/results/compression/, and writes three pictures into docs/images/: attacks on
clients against ε, below what (ε, δ) allows and what the whole mechanism does, by its privacy loss distribution;
accuracy against ε; and accuracy against bytes.
"""

import csv
import gzip
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from matplotlib.pyplot import rc_context, subplots
from pictures import save
from scipy.stats import beta, t

from lightning_fed.functional.privacy import gaussian_noise
from lightning_fed.lab.attack.figures import most_true

__all__ = ["main", "proven"]

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS / "results"
GREY = "#808080"  # reads on white and on black
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "legend.labelcolor")
STYLE: dict[Any, Any] = {**dict.fromkeys(INKED, GREY), "axes.titlecolor": GREY, "font.size": 9}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
ARMS = ("none", "clip alone", "ε = 50", "ε = 8", "ε = 2")
DELTA, SHARE, ROUNDS, AUDITED = (
    1e-3,
    50 / 250,
    100,
    125,
)  # of privacy/attack; clients of either kind that are told apart


def rows(folder: str, name: str = "results.csv") -> list[dict[str, str]]:
    """Reads a CSV of a study's folder."""
    path = RESULTS / folder / name
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return list(csv.DictReader(file))


def of_seeds(folder: str, column: str, **axes: str) -> list[float]:
    """Returns a column of the runs of a cell."""
    return [
        float(row[column])
        for row in rows(folder)
        if {k.replace("_", " "): v for k, v in axes.items()}.items() <= row.items()
    ]


def interval(values: list[float]) -> tuple[float, float]:
    """Returns the mean and half of its 95 % interval by Student's t."""
    return fmean(values), float(t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5


def allowed(arm: str, whole: bool) -> tuple[float, float]:
    """Returns the largest accuracy, and true positive rate at 1 % false ones, that an ε allows on clients.

    By (ε, δ) alone, or by all pairs (ε', δ(ε')) of the sampled Gaussian mechanism of the study.
    """
    if not arm.startswith("ε"):
        return 1.0, 1.0
    epsilon = float(arm.split()[-1])
    pairs = [(epsilon, DELTA)]
    if whole:
        event = GaussianDpEvent(gaussian_noise(epsilon, SHARE, ROUNDS, DELTA))
        accountant = PLDAccountant(value_discretization_interval=1e-4)
        accountant.compose(SelfComposedDpEvent(PoissonSampledDpEvent(SHARE, event), ROUNDS))
        epsilons = np.linspace(0, epsilon, 101)
        pairs = list(zip(epsilons.tolist(), np.atleast_1d(accountant.get_delta(epsilons)).tolist(), strict=True))
    true = min(float(most_true(torch.tensor(0.01), *pair)) for pair in pairs)
    return min((1 + d * np.exp(-e)) / (1 + np.exp(-e)) for e, d in pairs), true


def proven(accuracies: Iterable[float]) -> float:
    """Returns the ε that the accuracies of some runs prove together, with 97.5 % confidence; 0 for none.

    log((a − δ) / (1 − a)) at the lower end a of the interval by Clopper and Pearson, of all clients that were told
    apart by a threshold fitted on others (Steinke, Nasr, Jagielski, NeurIPS 2023).
    """
    counts = [round(2 * AUDITED * accuracy) for accuracy in accuracies]
    right, of = sum(counts), 2 * AUDITED * len(counts)
    low = float(beta.ppf(0.025, right, of - right + 1))
    return max(0.0, float(np.log((low - DELTA) / (1 - low))))


def draw_attacks() -> None:
    """Draws accuracy and true positives of the attack on clients against ε, and prints what they prove."""
    figure, axes = subplots(1, 2, figsize=(8.5, 3.6), layout="constrained")
    bounds = {whole: [allowed(arm, whole) for arm in ARMS] for whole in (False, True)}
    for number, (axis, name) in enumerate(zip(axes, ("accuracy", "tpr_at_0.01"), strict=True)):
        for own, signed, colour in (("a signature", "signatures", COLOURS[0]), ("none", "without", COLOURS[1])):
            for at, arm in enumerate(ARMS):
                found = of_seeds("privacy/attack", f"attack/client/{name} final", own_data=own, privacy=arm)
                if found:
                    mean, half = interval(found)
                    label = None if at else f"attack, {signed}"
                    axis.errorbar(at, mean, half, fmt="o", color=colour, capsize=3, label=label)
        for whole, style in ((False, ":"), (True, "--")):
            label = "most, by the mechanism" if whole else "most, by (ε, δ)"
            axis.plot([bound[number] for bound in bounds[whole]], style, color=GREY, label=label)
        axis.axhline((0.5, 0.01)[number], color=GREY, linewidth=0.7)
        axis.set_title(("accuracy", "TPR at 1 % FPR")[number])
        axis.set_xticks(range(len(ARMS)), ARMS)
        axis.set_ylim((0.45, 0)[number], 1.02)
        axis.grid(axis="y", color=GREY, alpha=0.25)
    axes[1].legend(framealpha=0, loc=(0.02, 0.48))
    save(figure, DOCS / "images/privacy-attack.png", dpi=140, transparent=True)
    for arm, *most in zip(ARMS, *bounds.values(), strict=True):
        rates = of_seeds("privacy/attack", "attack/client/accuracy final", own_data="a signature", privacy=arm)
        told = ", ".join(f"accuracy {a:.4f} TPR {b:.4f}" for a, b in most)
        print(f"{arm}: at most {told}; proves ε ≥ {proven(rates):.2f}")


def draw_costs() -> None:
    """Draws accuracy against ε for each rule."""
    figure, axis = subplots(figsize=(5.0, 3.4), layout="constrained")
    arms = [arm for arm in ARMS if arm != "clip alone"]
    for shift, (rule, colour) in enumerate(zip(("FedAvg", "FedYogi", "GMA", "NoiseFloorMask"), COLOURS, strict=False)):
        cells = {
            at: of_seeds("privacy/fashionmnist", "test/acc last 10", rule=rule, privacy=arm)
            for at, arm in enumerate(arms)
        }
        ends = {at: interval([100 * value for value in found]) for at, found in cells.items() if found}
        places = [at + 0.06 * (shift - 1.5) for at in ends]
        means, halves = zip(*ends.values(), strict=True)
        axis.errorbar(places, means, halves, fmt="o-", color=colour, capsize=3, label=rule)
    axis.set_xticks(range(len(arms)), arms)
    axis.set_ylabel("test accuracy, %")
    axis.grid(axis="y", color=GREY, alpha=0.25)
    axis.legend(framealpha=0)
    save(figure, DOCS / "images/privacy.png", dpi=140, transparent=True)


def draw_bytes() -> None:
    """Draws accuracy against the bytes that all clients have sent, a panel for each rule."""
    curves = rows("compression/fashionmnist", "curves.csv.gz")
    rules, codecs = (list(dict.fromkeys(row[axis] for row in curves)) for axis in ("rule", "codec"))
    figure, axes = subplots(1, len(rules), figsize=(8.5, 3.2), sharey=True, layout="constrained")
    for axis, rule in zip(axes, rules, strict=True):
        for codec, colour in zip(codecs, COLOURS, strict=True):
            of = [row for row in curves if (row["rule"], row["codec"]) == (rule, codec) and row["test/acc"]]
            rounds = sorted({int(row["round"]) for row in of} - {0})
            points = [[row for row in of if int(row["round"]) == at] for at in rounds]
            sent = [fmean(float(row["comm/bytes_up"]) / 1e6 for row in each) for each in points]
            axis.plot(
                sent,
                [100 * fmean(float(row["test/acc"]) for row in each) for each in points],
                color=colour,
                label=codec,
            )
        axis.set(xscale="log", xlabel="sent by all clients, MB", title=rule)
        axis.grid(color=GREY, alpha=0.25)
    axes[0].set_ylabel("test accuracy, %")
    axes[0].legend(framealpha=0)
    save(figure, DOCS / "images/compression.png", dpi=140, transparent=True)


def main() -> None:
    """Draws the pictures."""
    with rc_context(STYLE):
        draw_attacks()
        draw_costs()
        draw_bytes()


if __name__ == "__main__":
    main()
