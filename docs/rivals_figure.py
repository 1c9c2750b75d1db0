"""Draws how each rule for updates that disagree compares with FedAvg.

    python docs/rivals_figure.py

reads docs/results/rivals/digits/table.csv and writes docs/images/rivals.png: for each rule the difference to FedAvg in
test accuracy, of all and of the worst tenth of the clients, mean and 95 % interval over seeds.
"""

import csv
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.pyplot import rc_context, subplots

__all__ = ["main"]

DOCS = Path(__file__).resolve().parent
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
GREY = "#808080"  # reads on white and on black
COLOURS = {"above": "#009e73", "below": "#d55e00", "around": GREY}
PANELS = {"test/acc": "test accuracy", "per_client/acc_worst": "worst tenth of the clients"}


def side_of(low: float, high: float) -> str:
    """Says where an interval lies of 0."""
    return "above" if low > 0 else "below" if high < 0 else "around"


def main() -> None:
    """Draws the picture."""
    table = list(csv.DictReader((DOCS / "results/rivals/digits/table.csv").open()))
    cells = {(row["metric"], row["rule"]): row for row in table if row["t_low"]}
    first = next(iter(PANELS))
    rules = sorted(
        (rule for metric, rule in cells if metric == first), key=lambda rule: -float(cells[first, rule]["difference"])
    )
    ink: dict[Any, Any] = dict.fromkeys(INKED, GREY)
    with rc_context({**ink, "axes.titlecolor": GREY, "font.size": 9}):
        figure, axes = subplots(1, len(PANELS), figsize=(7.5, 4.8), sharey=True, layout="constrained")
        for axis, (metric, title) in zip(axes, PANELS.items(), strict=True):
            for at, rule in enumerate(rules):
                row = cells[metric, rule]
                mean, low, high = (100 * float(row[name]) for name in ("difference", "t_low", "t_high"))
                colour = COLOURS[side_of(low, high)]
                axis.errorbar(mean, at, xerr=[[mean - low], [high - mean]], fmt="o", color=colour, capsize=3)
            axis.axvline(0, color=GREY, linewidth=0.8)
            axis.set_title(title, fontsize=10)
            axis.set_xlabel("difference to FedAvg, points")
            axis.grid(axis="x", color=GREY, alpha=0.25)
        axes[0].set_yticks(range(len(rules)), rules)
        axes[0].set_ylim(len(rules) - 0.5, -0.5)
        figure.savefig(DOCS / "images" / "rivals.png", dpi=140, transparent=True)


if __name__ == "__main__":
    main()
