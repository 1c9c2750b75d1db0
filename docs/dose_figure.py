"""Draws how much a mask gains by how many clients share a feature, and how it holds the feature back over time.

    python docs/dose_figure.py

reads docs/results/mask/signatures/ and writes two pictures, of inputs with a wrong signature, to docs/images/.
mask-dose.png has the difference to FedAvg, mean and 95 % interval over seeds. mask-time.png has how much a model relies
on signatures in each round, accuracy without one less accuracy with a wrong one, and what GMA's reliance in round t
should not exceed: FedAvg's in round t k / 10, with k clients that share a signature.
"""

import csv
import gzip
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.pyplot import rc_context, subplots
from pictures import save

__all__ = ["main", "reliance"]

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS / "results/mask/signatures"
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
GREY = "#808080"  # reads on white and on black
RULES = {
    "GMA": ("#d55e00", "GMA"),
    "GMA at FedAvg's length": ("#e69f00", "its direction, at FedAvg's length"),
    "FedAvg at GMA's length": ("#009e73", "its length alone"),
}
OVER_TIME = {"FedAvg": GREY, "GMA": "#d55e00", "AND-mask": "#3b8bd6"}
PANELS = {"dark": "other blocks dark: no vote at all", "lit at random": "other blocks lit at random: votes are noise"}
CLIENTS = 10


def reliance(shared: int) -> dict[str, dict[int, list[float]]]:
    """Returns by rule and round, other blocks dark, the reliance in points of each seed, in the order of seeds."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    with gzip.open(RESULTS / "curves.csv.gz", "rt") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: int(row["seed"]))
    for row in rows:
        if (row["other blocks"], row["shared by"]) == ("dark", str(shared)):
            lost = 100 * (float(row["test/acc/none"]) - float(row["test/acc/wrong"]))
            found[row["rule"]][int(row["round"])].append(lost)
    return found


def over_time(axis: Any, shared: int) -> None:
    """Draws the reliance of three rules, and the bound of the soft mask's."""
    rules = reliance(shared)
    for rule, colour in OVER_TIME.items():
        axis.plot([*rules[rule]], [fmean(seeds) for seeds in rules[rule].values()], color=colour, label=rule)
    slowed = [at * CLIENTS / shared for at in rules["FedAvg"]]
    bound = [fmean(seeds) for seeds in rules["FedAvg"].values()]
    axis.plot(slowed, bound, ":", color=OVER_TIME["GMA"], label=f"FedAvg, {CLIENTS // shared} times as slow")
    axis.set_xlim(0, max(rules["FedAvg"]))
    axis.set_title(f"a signature of {shared} of {CLIENTS} clients", fontsize=10)
    axis.set_xlabel("round")


def gains(axis: Any, rows: list[dict[str, str]], blocks: str) -> None:
    """Draws the difference of each rule to FedAvg by the number of clients that share a signature."""
    for shift, (rule, (colour, name)) in enumerate(RULES.items()):
        cells = [r for r in rows if (r["rule"], r["other blocks"], r["metric"]) == (rule, blocks, "test/acc/wrong")]
        means = [100 * float(cell["difference"]) for cell in cells]
        ends = [[100 * abs(float(c[end]) - float(c["difference"])) for c in cells] for end in ("t_low", "t_high")]
        at = [place + 0.12 * (shift - 1) for place in range(len(cells))]
        axis.errorbar(at, means, yerr=ends, fmt="o", color=colour, capsize=3, label=name)
    axis.set_xticks(range(3), ["1", "2", "5"])
    axis.axhline(0, color=GREY, linewidth=0.8)
    axis.set_title(PANELS[blocks], fontsize=10)
    axis.set_xlabel("clients of 10 that share a signature")


def main() -> None:
    """Draws the pictures."""
    rows = list(csv.DictReader((RESULTS / "table.csv").open()))
    ink: dict[Any, Any] = dict.fromkeys(INKED, GREY)
    with rc_context({**ink, "axes.titlecolor": GREY, "grid.color": GREY, "grid.alpha": 0.25}):
        figure, axes = subplots(1, len(PANELS), figsize=(7.5, 3.5), sharey=True, layout="constrained")
        for axis, blocks in zip(axes, PANELS, strict=True):
            gains(axis, rows, blocks)
            axis.grid(axis="y")
        axes[0].set_ylabel("difference to FedAvg, points\n(inputs with a wrong signature)")
        axes[1].legend(fontsize=8, loc="upper left", framealpha=0)
        save(figure, DOCS / "images" / "mask-dose.png", dpi=140, transparent=True)
        figure, axes = subplots(1, 2, figsize=(7.5, 2.8), sharey=True, layout="constrained")
        for axis, shared in zip(axes, (1, 2), strict=True):
            over_time(axis, shared)
            axis.grid(axis="y")
        axes[0].set_ylabel("points that a wrong\nsignature costs")
        for axis in axes:
            axis.legend(fontsize=8, loc="upper left", framealpha=0)
        save(figure, DOCS / "images" / "mask-time.png", dpi=110, transparent=True)


if __name__ == "__main__":
    main()
