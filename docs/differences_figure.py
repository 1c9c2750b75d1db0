"""Draws what GMA's mask does in the settings of the paper's tables.

    python docs/differences_figure.py

reads the tables below docs/results/gma and writes pictures to docs/images: for each cell the difference of the mask to
none, its 95 % interval, and the paper's gain.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.pyplot import rc_context, subplots
from pictures import save

__all__ = ["main"]

DOCS = Path(__file__).resolve().parent
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
GREY, BLUE, ORANGE = "#808080", "#3b8bd6", "#d55e00"  # read on white and on black
PAPER: dict[str, Any] = {"color": BLUE, "markersize": 12, "markeredgewidth": 2.5}
SHORT = {
    "per_client/acc_in": "in the round", "per_client/acc_out": "the others", "test/acc": "test",
    "per_client/acc_weighted": "train", "at equal per_client/loss_weighted": "equal train loss",
}  # fmt: skip
SPLITS = {"non-IID": "2 classes", "IID": "IID"}


@dataclass(frozen=True)
class Panel:
    """The rows of a table that one panel has, and how each is called."""

    title: str
    folder: str
    label: str
    chosen: dict[str, str] = field(default_factory=dict)

    def rows(self) -> list[dict[str, str]]:
        """Returns the rows that are compared, those of the mask unless another aggregation is chosen."""
        chosen = {"aggregation": "GMA", **self.chosen}
        table = csv.DictReader((DOCS / "results" / self.folder / "table.csv").open())
        return [
            row for row in table if chosen.items() <= row.items() and row["t_low"] and "before" not in row["metric"]
        ]


@dataclass(frozen=True)
class Picture:
    """Panels, two in a row."""

    panels: Sequence[Panel]
    height: float
    log: bool = False  # beyond one point, where an interval of one cell would hide all others


def by_split(folder: str, names: dict[str, str], label: str, **chosen: str) -> list[Panel]:
    """Returns a panel for each data set and split."""
    return [
        Panel(f"{name}, {split}", folder, label, {"data": data, "split": key, **chosen})
        for data, name in names.items()
        for key, split in SPLITS.items()
    ]


DATA = {"FMNIST": "FashionMNIST", "MNIST": "MNIST"}
SCHEMES = {"FedCMNIST": "FedCMNIST", "FedRotMNIST": "FedRotMNIST"}
DRAWN = "{clients per round} drawn, {metric}"
PICTURES = {
    "gma-rules": Picture(by_split("gma/table2", DATA, "{algorithm}", clients="100"), 4.0),
    "gma-schemes": Picture(
        [
            *by_split("gma/table3_feature_learned", {"FedCMNIST": "FedCMNIST, learned"}, "{algorithm}"),
            *by_split("gma/table3_feature_learned_yogi", {"FedCMNIST": "FedCMNIST, learned, FedYogi"}, "{algorithm}"),
            *by_split("gma/table3_feature", SCHEMES, "{algorithm}"),
        ],
        5.6,
        log=True,
    ),
    "gma-momentum": Picture(
        [
            *by_split("gma/table6", DATA, "momentum {momentum}"),
            Panel("FashionMNIST, 2 classes, 200 rounds", "gma/plateau", "{statistic}"),
            Panel("FedAvg at the mask's length", "gma/plateau", "{statistic}", {"aggregation": "its length"}),
        ],
        4.6,
    ),
    "gma-clients": Picture(
        [
            Panel("clients, all drawn", "gma/table8", "{clients}"),
            Panel("local epochs, a tenth of each", "gma/table9", "{epochs}"),
        ],
        2.5,
    ),
    "gma-convex": Picture(
        [Panel(split, "gma/convex", "{metric}", {"split": key}) for key, split in reversed(SPLITS.items())], 1.7
    ),
    "gma-participation": Picture(
        [
            Panel("one round from a trained model", "gma/tables4_5_trained", DRAWN),
            Panel("FedAvg at the mask's progress", "gma/tables4_5_trained", DRAWN, {"aggregation": "its progress"}),
            Panel("one round from 50 rounds of FedAvg", "gma/tables4_5", DRAWN, {"model of": "AVG"}),
            Panel("each rule with its own model", "gma/tables4_5", DRAWN, {"model of": "each rule"}),
        ],
        4.2,
    ),
}


def draw(axis: Axes, panel: Panel, log: bool) -> None:
    """Draws a panel."""
    rows = panel.rows()
    for at, row in enumerate(rows):
        mean, low, high = (100 * float(row[name]) for name in ("difference", "t_low", "t_high"))
        axis.errorbar(mean, at, xerr=[[mean - low], [high - mean]], fmt="o", color=ORANGE, capsize=3)
        if row["claimed"]:
            axis.plot(100 * float(row["claimed"]), at, "|", **PAPER)
    axis.axvline(0, color=GREY, linewidth=0.8)
    labels = [panel.label.format_map({name: SHORT.get(cell, cell) for name, cell in row.items()}) for row in rows]
    axis.set_yticks(range(len(rows)), labels)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_title(panel.title, fontsize=9)
    axis.grid(axis="x", color=GREY, alpha=0.25)
    if log:
        axis.set_xscale("symlog", linthresh=1, linscale=0.8)
        axis.set_xticks([-100, -10, -1, 0, 1, 10, 100], ["−100", "−10", "−1", "0", "+1", "+10", "+100"])


def main() -> None:
    """Draws the pictures."""
    ink: dict[Any, Any] = dict.fromkeys(INKED, GREY)
    for name, picture in PICTURES.items():
        with rc_context({**ink, "axes.titlecolor": GREY, "font.size": 9}):
            rows, size = len(picture.panels) // 2, (7, picture.height)
            share = {"sharex": "all"} if picture.log else {"sharex": "col"}
            figure, grid = subplots(rows, 2, figsize=size, squeeze=False, layout="constrained", **share)
            for axis, panel in zip(grid.flat, picture.panels, strict=True):
                draw(axis, panel, picture.log)
            grid[0, 0].errorbar(
                [], [], xerr=[], fmt="o", color=ORANGE, capsize=3, label="mask less none, 95 % interval"
            )
            grid[0, 0].plot([], [], "|", label="the paper's gain", **PAPER)
            beyond = " (logarithmic beyond 1)" if picture.log else ""
            figure.supxlabel(f"difference in accuracy, points{beyond}", fontsize=9)
            figure.legend(loc="outside upper center", ncols=2, frameon=False)
            save(figure, DOCS / "images" / f"{name}.png", dpi=140, transparent=True)


if __name__ == "__main__":
    main()
