"""Draws what GMA's mask does under each server and client rule.

    python docs/rules_figure.py

reads docs/results/gma/table2/table.csv and writes docs/images/gma-rules.png: for each data set, split and rule the
difference of the mask to the same rule without, its 95 % interval, and the paper's gain.
"""

import csv
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.pyplot import rc_context, subplots

__all__ = ["cells", "main"]

DOCS = Path(__file__).resolve().parent
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
GREY, BLUE, ORANGE = "#808080", "#3b8bd6", "#d55e00"  # read on white and on black
DATA = {"FMNIST": "FashionMNIST", "MNIST": "MNIST"}
SPLITS = {"non-IID": "2 classes", "IID": "IID"}
RULES = ("FedAvg", "FedProx", "SCAFFOLD", "FedAdam", "FedYogi")
PAPER: dict[str, Any] = {"color": BLUE, "markersize": 12, "markeredgewidth": 2.5}


def cells(path: Path, data: str, split: str) -> dict[str, dict[str, str]]:
    """Returns by rule the row of the mask with 100 clients."""
    chosen = {"data": data, "split": split, "clients": "100", "aggregation": "GMA"}
    return {row["algorithm"]: row for row in csv.DictReader(path.open()) if chosen.items() <= row.items()}


def main() -> None:
    """Draws the picture."""
    path = DOCS / "results/gma/table2/table.csv"
    ink: dict[Any, Any] = dict.fromkeys(INKED, GREY)
    with rc_context({**ink, "axes.titlecolor": GREY, "font.size": 9}):
        figure, grid = subplots(2, 2, figsize=(7, 4), sharex="col", sharey=True, layout="constrained")
        for axis, (data, split) in zip(grid.flat, [(d, s) for d in DATA for s in SPLITS], strict=True):
            for at, rule in enumerate(RULES):
                row = cells(path, data, split)[rule]
                mean, low, high = (100 * float(row[name]) for name in ("difference", "t_low", "t_high"))
                axis.errorbar(mean, at, xerr=[[mean - low], [high - mean]], fmt="o", color=ORANGE, capsize=3)
                if row["claimed"]:
                    axis.plot(100 * float(row["claimed"]), at, "|", **PAPER)
            axis.axvline(0, color=GREY, linewidth=0.8)
            axis.set_yticks(range(len(RULES)), RULES)
            axis.set_title(f"{DATA[data]}, {SPLITS[split]}", fontsize=9)
            axis.grid(axis="x", color=GREY, alpha=0.25)
        grid[0, 0].set_ylim(len(RULES) - 0.5, -0.5)
        grid[0, 0].errorbar([], [], xerr=[], fmt="o", color=ORANGE, capsize=3, label="mask less none, 95 % interval")
        grid[0, 0].plot([], [], "|", label="the paper's gain", **PAPER)
        figure.supxlabel("difference in test accuracy, points", fontsize=9)
        figure.legend(loc="outside upper center", ncols=2, frameon=False)
        figure.savefig(DOCS / "images" / "gma-rules.png", dpi=140, transparent=True)


if __name__ == "__main__":
    main()
