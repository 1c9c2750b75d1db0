"""Draws how much a mask gains by how many clients share a feature, and how it holds the feature back over time.

    python docs/dose_figure.py

reads docs/results/mask/signatures/ and mask/dose/ and writes three pictures, of inputs with a wrong signature, to
docs/images/. mask-dose.png has the difference to FedAvg, mean and 95 % interval over seeds. mask-time.png has how much
a model relies on signatures in each round, accuracy without one less accuracy with a wrong one, and what GMA's reliance
in round t should not exceed: FedAvg's in round t k / 10, with k clients that share a signature. mask-600.png has the
same over 600 rounds.
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

__all__ = ["DOSE", "SIGNATURES", "main", "reliance"]

DOCS = Path(__file__).resolve().parent
SIGNATURES = DOCS / "results/mask/signatures"
DOSE = DOCS / "results/mask/dose"
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
GREY = "#808080"  # reads on white and on black
RULES = {
    "GMA": ("#d55e00", "GMA"),
    "GMA at FedAvg's length": ("#e69f00", "its direction, at FedAvg's length"),
    "FedAvg at GMA's length": ("#009e73", "its length alone"),
}
OVER_TIME = {
    "FedAvg": GREY,
    "FedAvg at GMA's progress": "#009e73",
    "GMA": "#d55e00",
    "AND-mask": "#3b8bd6",
    "Median": "#cc79a7",
}
PANELS = {"dark": "other blocks dark: no vote at all", "lit at random": "other blocks lit at random: votes are noise"}
CLIENTS = 10


def reliance(folder: Path, shared: int, rate: str = "0.05") -> dict[str, dict[int, list[float]]]:
    """Returns by rule and round, other blocks dark, the reliance in points of each seed, in their order."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    with gzip.open(folder / "curves.csv.gz", "rt") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: int(row["seed"]))
    for row in rows:
        cell = row["other blocks"], row["shared by"], row.get("client rate", "0.05")
        if cell == ("dark", str(shared), rate):
            lost = 100 * (float(row["test/acc/none"]) - float(row["test/acc/wrong"]))
            found[row["rule"]][int(row["round"])].append(lost)
    return found


def over_time(axis: Any, folder: Path, shared: int) -> None:
    """Draws the reliance of each rule, and the bound of the soft mask's."""
    rules = reliance(folder, shared)
    for rule, colour in OVER_TIME.items():
        if rule in rules:
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


def by_round(folder: Path, shares: tuple[int, ...], name: str) -> None:
    """Draws the reliance by round, a panel for each number of clients that share a signature."""
    figure, axes = subplots(1, len(shares), figsize=(7.5, 3.2), sharey=True, layout="constrained", squeeze=False)
    for axis, shared in zip(axes[0], shares, strict=True):
        over_time(axis, folder, shared)
        axis.grid(axis="y")
        axis.legend(fontsize=8, loc="upper left", framealpha=0)
    axes[0][0].set_ylim(top=1.6 * axes[0][0].get_ylim()[1])  # room for the names
    axes[0][0].set_ylabel("points that a wrong\nsignature costs")
    save(figure, DOCS / "images" / name, dpi=110, transparent=True)


def main() -> None:
    """Draws the pictures."""
    rows = list(csv.DictReader((SIGNATURES / "table.csv").open()))
    ink: dict[Any, Any] = dict.fromkeys(INKED, GREY)
    with rc_context({**ink, "axes.titlecolor": GREY, "grid.color": GREY, "grid.alpha": 0.25}):
        figure, axes = subplots(1, len(PANELS), figsize=(7.5, 3.5), sharey=True, layout="constrained")
        for axis, blocks in zip(axes, PANELS, strict=True):
            gains(axis, rows, blocks)
            axis.grid(axis="y")
        axes[0].set_ylabel("difference to FedAvg, points\n(inputs with a wrong signature)")
        axes[1].legend(fontsize=8, loc="upper left", framealpha=0)
        save(figure, DOCS / "images" / "mask-dose.png", dpi=140, transparent=True)
        by_round(SIGNATURES, (1, 2), "mask-time.png")
        by_round(DOSE, (1, 2), "mask-600.png")


if __name__ == "__main__":
    main()
