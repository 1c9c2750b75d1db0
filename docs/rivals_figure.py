"""Draws how each rule for updates that disagree compares with FedAvg.

    python docs/rivals_figure.py

reads docs/results/rivals/STUDY/table.csv and writes docs/images/rivals.png (digits: all test images, and the worst
tenth of the clients), docs/images/rivals-signatures.png (inputs with a wrong signature, which 1, 2 or 5 of 10
clients share) and docs/images/rivals-images.png (FashionMNIST, EMNIST, MNIST with shuffled labels, and new colours):
for each rule the difference to FedAvg in accuracy, mean and 95 % interval over seeds.
"""

import csv
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.pyplot import rc_context, subplots
from pictures import save

__all__ = ["main"]

DOCS = Path(__file__).resolve().parent
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
GREY = "#808080"  # reads on white and on black
COLOURS = {"above": "#009e73", "below": "#d55e00", "around": GREY}
# What a panel shows: a study, and the rows of its table, under the panel's title.
PICTURES: dict[str, dict[str, tuple[str, dict[str, str]]]] = {
    "rivals": {
        "test accuracy": ("digits", {"metric": "test/acc"}),
        "worst tenth of the clients": ("digits", {"metric": "per_client/acc_worst"}),
    },
    "rivals-signatures": {
        title: ("signatures", {"metric": "test/acc/wrong", "shared by": k})
        for title, k in (("1 client of 10", "1"), ("2 clients of 10", "2"), ("5 clients of 10", "5"))
    },
    "rivals-images": {
        "FashionMNIST": ("fashionmnist", {"metric": "test/acc"}),
        "EMNIST, one class": ("one_class", {"metric": "test/acc"}),
        "shuffled labels": ("shuffled", {"metric": "test/acc"}),
        "new colours": ("new_colours", {"metric": "test/acc/new_scheme"}),
    },
}


def side_of(low: float, high: float) -> str:
    """Says where an interval lies of 0."""
    return "above" if low > 0 else "below" if high < 0 else "around"


def differences(study: str, chosen: dict[str, str]) -> dict[str, tuple[float, float, float]]:
    """Returns mean, low and high end of each rule's difference, in points, of the rows that a panel shows."""
    table = list(csv.DictReader((DOCS / "results/rivals" / study / "table.csv").open()))
    rows = [row for row in table if row["t_low"] and all(row[name] == value for name, value in chosen.items())]
    names = ("difference", "t_low", "t_high")
    return {row["rule"]: (100 * float(row[names[0]]), *(100 * float(row[n]) for n in names[1:])) for row in rows}  # type: ignore[misc]


def draw(picture: str, panels: dict[str, tuple[str, dict[str, str]]]) -> None:
    """Draws one picture; rules are in the order of the first panel, then those that only others have."""
    found = {title: differences(*shown) for title, shown in panels.items()}
    rules = list(dict.fromkeys(rule for cells in found.values() for rule in sorted(cells, key=lambda r: -cells[r][0])))
    ink: dict[Any, Any] = dict.fromkeys(INKED, GREY)
    with rc_context({**ink, "axes.titlecolor": GREY, "font.size": 9}):
        figure, axes = subplots(1, len(panels), figsize=(7.5, 1 + 0.19 * len(rules)), sharey=True, layout="constrained")
        for axis, (title, cells) in zip(axes, found.items(), strict=True):
            for at, rule in enumerate(rules):
                if rule not in cells:
                    continue
                mean, low, high = cells[rule]
                colour = COLOURS[side_of(low, high)]
                axis.errorbar(mean, at, xerr=[[mean - low], [high - mean]], fmt="o", color=colour, capsize=3)
            axis.axvline(0, color=GREY, linewidth=0.8)
            axis.set_title(title, fontsize=10)
            axis.grid(axis="x", color=GREY, alpha=0.25)
        figure.supxlabel("difference to FedAvg, points", fontsize=9, color=GREY)
        axes[0].set_yticks(range(len(rules)), rules)
        axes[0].set_ylim(len(rules) - 0.5, -0.5)
        save(figure, DOCS / "images" / f"{picture}.png", dpi=140, transparent=True)


def main() -> None:
    """Draws the pictures."""
    for picture, panels in PICTURES.items():
        draw(picture, panels)


if __name__ == "__main__":
    main()
