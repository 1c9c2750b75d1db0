"""Draws how much a mask gains by how many clients share a feature.

    python docs/dose_figure.py

reads docs/results/mask/signatures/table.csv and writes docs/images/mask-dose.png: on inputs with a wrong signature the
difference to FedAvg, mean and 95 % interval over seeds.
"""

import csv
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.pyplot import rc_context, subplots
from pictures import save

DOCS = Path(__file__).resolve().parent
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
GREY = "#808080"  # reads on white and on black
RULES = {
    "GMA": ("#d55e00", "GMA"),
    "GMA at FedAvg's length": ("#e69f00", "its direction, at FedAvg's length"),
    "FedAvg at GMA's length": ("#009e73", "its length alone"),
}
PANELS = {"dark": "other blocks dark: no vote at all", "lit at random": "other blocks lit at random: votes are noise"}


def main() -> None:
    """Draws the picture."""
    rows = list(csv.DictReader((DOCS / "results/mask/signatures/table.csv").open()))
    ink: dict[Any, Any] = dict.fromkeys(INKED, GREY)
    with rc_context({**ink, "axes.titlecolor": GREY}):
        figure, axes = subplots(1, len(PANELS), figsize=(7.5, 3.5), sharey=True, layout="constrained")
        for axis, (blocks, title) in zip(axes, PANELS.items(), strict=True):
            for shift, (rule, (colour, name)) in enumerate(RULES.items()):
                cells = [
                    r for r in rows if (r["rule"], r["other blocks"], r["metric"]) == (rule, blocks, "test/acc/wrong")
                ]
                means = [100 * float(cell["difference"]) for cell in cells]
                ends = [
                    [100 * abs(float(c[end]) - float(c["difference"])) for c in cells] for end in ("t_low", "t_high")
                ]
                at = [place + 0.12 * (shift - 1) for place in range(len(cells))]
                axis.errorbar(at, means, yerr=ends, fmt="o", color=colour, capsize=3, label=name)
            axis.set_xticks(range(3), ["1", "2", "5"])
            axis.axhline(0, color=GREY, linewidth=0.8)
            axis.set_title(title, fontsize=10)
            axis.set_xlabel("clients of 10 that share a signature")
            axis.grid(axis="y", color=GREY, alpha=0.25)
        axes[0].set_ylabel("difference to FedAvg, points\n(inputs with a wrong signature)")
        axes[1].legend(fontsize=8, loc="upper left", framealpha=0)
        save(figure, DOCS / "images" / "mask-dose.png", dpi=140, transparent=True)


if __name__ == "__main__":
    main()
