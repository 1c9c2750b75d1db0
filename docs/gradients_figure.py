"""Draws accuracy, loss and distance of gradients under FedAvg, SCAFFOLD and FedGA.

    python docs/gradients_figure.py

reads docs/results/fedga/figures9_10/curves.csv.gz and writes docs/images/fedga-gradients.png: over rounds of
communication the mean of three seeds, and their range. FedProx is left out: it is level with FedAvg or collapses.
"""

import csv
import gzip
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.pyplot import rc_context, subplots
from pictures import save

__all__ = ["curve", "main"]

DOCS = Path(__file__).resolve().parent
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
GREY = "#808080"  # reads on white and on black
METHODS = {"FedAvg": "#3b8bd6", "SCAFFOLD": "#009e73", "FedGA": "#d55e00"}
PANELS = (
    ("IID", "test/acc", "IID: test accuracy, %", (70, 84)),
    ("one class", "test/acc", "one class: test accuracy, %", (0, 84)),
    ("IID", "test/loss", "IID: test loss", (0.5, 0.9)),
    ("IID", "gradient/distance", "IID: mean distance of gradients", (0, 1.5)),
)


def curve(rows: list[dict[str, str]], split: str, method: str, metric: str) -> dict[float, list[float]]:
    """Returns the values of all seeds by rounds of communication."""
    found: dict[float, list[float]] = defaultdict(list)
    for row in rows:
        if (row["split"], row["method"]) == (split, method) and row[metric] and row["comm/rounds"]:
            found[float(row["comm/rounds"])].append((100 if metric == "test/acc" else 1) * float(row[metric]))
    return dict(sorted(found.items()))


def main() -> None:
    """Draws the picture."""
    with gzip.open(DOCS / "results/fedga/figures9_10/curves.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    ink: dict[Any, Any] = dict.fromkeys(INKED, GREY)
    with rc_context({**ink, "axes.titlecolor": GREY, "font.size": 9}):
        figure, grid = subplots(2, 2, figsize=(7, 4.6), sharex=True, layout="constrained")
        for axis, (split, metric, title, limits) in zip(grid.flat, PANELS, strict=True):
            for method, colour in METHODS.items():
                values = curve(rows, split, method, metric)
                axis.plot([*values], [mean(every) for every in values.values()], color=colour, label=method)
                low, high = ([end(every) for every in values.values()] for end in (min, max))
                axis.fill_between([*values], low, high, color=colour, alpha=0.2, linewidth=0)
            axis.set_title(title, fontsize=9)
            axis.set_ylim(*limits)
            axis.grid(color=GREY, alpha=0.25)
        figure.supxlabel("rounds of communication", fontsize=9)
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
        save(figure, DOCS / "images" / "fedga-gradients.png", dpi=140, transparent=True)


if __name__ == "__main__":
    main()
