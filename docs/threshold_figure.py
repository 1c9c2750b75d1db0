"""Draws accuracy over the threshold of GMA's mask.

    python docs/threshold_figure.py

reads docs/results/gma/figure3d/results.csv and writes docs/images/gma-threshold.png: the accuracy of each seed, and
their mean and standard deviation; of a threshold at which a seed diverged, the seeds that are left.
"""

import csv
import math
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.pyplot import rc_context, subplots
from pictures import save

__all__ = ["main", "seeds"]

DOCS = Path(__file__).resolve().parent
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
GREY, BLUE = "#808080", "#3b8bd6"  # read on white and on black


def seeds(path: Path) -> dict[float, list[float]]:
    """Returns by threshold the accuracy of each seed in percent, NaN where it diverged."""
    found: dict[float, list[float]] = defaultdict(list)
    for row in csv.DictReader(path.open()):
        found[float(row["threshold"])].append(100 * float(row["test/acc last 10"]))
    return found


def main() -> None:
    """Draws the picture."""
    ink: dict[Any, Any] = dict.fromkeys(INKED, GREY)
    with rc_context({**ink, "font.size": 9}):
        figure, axis = subplots(figsize=(7, 3.2), layout="constrained")
        for threshold, every in seeds(DOCS / "results/gma/figure3d/results.csv").items():
            kept = [one for one in every if not math.isnan(one)]
            axis.plot([threshold] * len(kept), kept, ".", color=GREY, alpha=0.7)
            whole = len(kept) == len(every)
            face = BLUE if whole else "none"
            axis.errorbar(
                threshold + 0.015, mean(kept), stdev(kept), fmt="o", color=BLUE, markerfacecolor=face, capsize=3
            )
        axis.plot([], [], ".", color=GREY, alpha=0.7, label="a seed")
        axis.plot([], [], "o", color=BLUE, label="mean ± standard deviation of 3 seeds")
        axis.plot([], [], "o", color=BLUE, markerfacecolor="none", label="of 2 seeds, one diverged")
        axis.set_xticks([step / 10 for step in range(10)])
        axis.set_xlabel("threshold τ (0: FedAvg)")
        axis.set_ylabel("test accuracy, %")
        axis.grid(axis="y", color=GREY, alpha=0.25)
        figure.legend(loc="outside upper center", ncols=3, frameon=False)
        save(figure, DOCS / "images" / "gma-threshold.png", dpi=140, transparent=True)


if __name__ == "__main__":
    main()
