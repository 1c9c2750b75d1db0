"""Draws what the runs say of each published gain, and writes the tables of claims.

    python docs/forest_figure.py

reads the tables of docs/results, and writes docs/images/forest.png and what claims.py writes.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from claims import RESULTS, signed, write_tables

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.pyplot import rc_context, subplots
from pictures import save

__all__ = ["main"]

DOCS = Path(__file__).resolve().parent
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
GREY = "#808080"  # reads on white and on black
COLOURS = {"ahead": "#009e73", "behind": "#d55e00", "level": "#cc79a7", "undecided": GREY}
PAPER: dict[str, Any] = {"color": "#3b8bd6", "markersize": 9, "markeredgewidth": 2}
GROUPS = {
    "mask/signatures": "Data made for the mask: its direction, by clients that share a feature",
    "mask/noise": "",
    "gma/tables4_5_trained": "GMA, Tables 4 and 5: one round from a model of 86 %, 5 or 2 of 10 clients drawn",
    "gma/tables4_5": "GMA, Tables 4 and 5: one round after 50 rounds",
    "gma/convex": "GMA, appendix E: convex",
    "gma/table2": "GMA, Table 2: data, split, clients, rule",
    "gma/table2_iid": "GMA, Table 2: IID, to 200 rounds",
    "gma/table3_feature_learned": "GMA, Table 3: colours of no client, to a model that has learned",
    "gma/table3_feature_learned_yogi": "GMA, Table 3: the same under FedYogi",
    "gma/table3_feature": "GMA, Table 3: colours of no client, after 30 rounds",
    "gma/plateau": "GMA, Table 6: FashionMNIST, 2 classes, momentum 0.9, 200 rounds",
    "gma/table6": "GMA, Table 6: momentum 0 and 0.9",
    "gma/table8": "GMA, Table 8: clients",
    "gma/table8_rates": "GMA, Table 8: 250 clients, each method at its own server rate",
    "gma/table9": "GMA, Table 9: local epochs (a tenth)",
    "gma/table10": "GMA, Table 10: momentum, server and client rate",
}
SHORT = {
    "per_client/acc_in": "in it", "per_client/acc_out": "others", "per_client/acc_weighted": "train",
    "non-IID": "2 classes", "AVG": "FedAvg's model", "each rule": "own models", "dark": "others do not vote",
    "lit at random": "all vote", "test/acc": "test",
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A line of the picture, in points."""

    name: str
    mean: float
    ends: tuple[float, float]
    claimed: float
    word: str


def lines_of(folder: str) -> tuple[list[Line], int]:
    """Returns the compared cells of a table, and how many are left out as nothing was learned."""
    rows = list(csv.DictReader((RESULTS / folder / "table.csv").open()))
    kept = [row for row in rows if row["verdict"] and (row["published"] or is_shown(row) or is_pooled(row))]
    names = list(rows[0])[: list(rows[0]).index("seeds")]
    hidden = ("aggregation", "statistic", "rule", "batch size")
    told = [name for name in names if name not in hidden and len({row[name] for row in kept}) > 1]
    lines = [
        Line(
            ", ".join(dict.fromkeys(SHORT.get(row[name], row[name]) for name in told)) or row["statistic"],
            100 * float(row["difference"]), (100 * float(row["t_low"]), 100 * float(row["t_high"])),
            100 * float(row["claimed"]), row["here"].partition(" ")[0],
        )
        for row in kept if row["here"] != "nothing learned"
    ]  # fmt: skip
    return lines, len(kept) - len(lines)


def is_shown(row: Mapping[str, str]) -> bool:
    """Says whether a row of the data made for the mask is in the picture."""
    return row.get("rule") == "GMA at FedAvg's length" and row["statistic"] == "last 10"


def is_pooled(row: Mapping[str, str]) -> bool:
    """Says whether a row pools cells with published gains."""
    return any((cell or "").endswith(" pooled") for cell in row.values()) and row["here"] != row["verdict"]


def placed() -> tuple[list[tuple[float, str, Line]], list[tuple[float, str]], int]:
    """Returns cells with their places and labels, the groups' titles with theirs, and how many cells are left out."""
    cells: list[tuple[float, str, Line]] = []
    titles: list[tuple[float, str]] = []
    at, left_out = 0.0, 0
    for folder, title in GROUPS.items():
        lines, out = lines_of(folder)
        left_out += out
        if title:
            titles.append((at + 0.3, title))
            at += 1.5
        for line in lines:
            cells.append((at, f"noise, {line.name} clients" if folder == "mask/noise" else line.name, line))
            at += 1
    return cells, titles, left_out


def draw(axis: Axes, cells: list[tuple[float, str, Line]], titles: list[tuple[float, str]]) -> None:
    """Draws intervals, marks and a legend's entries."""
    for at, _, line in cells:
        axis.plot(line.ends, [at, at], color=COLOURS[line.word], linewidth=1.6)
        axis.plot(line.mean, at, "o", color=COLOURS[line.word], markersize=4)
        axis.plot(line.claimed, at, "|", **PAPER)
    for at, title in titles:
        axis.text(-0.33, at, title, transform=axis.get_yaxis_transform(), fontsize=8, fontweight="bold", va="center")
    for word, colour in COLOURS.items():
        axis.plot([], [], "o-", color=colour, markersize=4, label=word)
    axis.plot([], [], "|", label="the paper's gain", **PAPER)
    axis.set_yticks([at for at, *_ in cells], [label for _, label, _ in cells], fontsize=7)
    axis.set_ylim(cells[-1][0] + 1, -1)


def picture() -> tuple[int, int]:
    """Draws the picture; returns how many cells it has, and how many it leaves out."""
    cells, titles, left_out = placed()
    ink: dict[Any, Any] = dict.fromkeys(INKED, GREY)
    with rc_context({**ink, "font.size": 8}):
        figure, axis = subplots(figsize=(7, 0.145 * cells[-1][0] + 0.8), layout="constrained")
        draw(axis, cells, titles)
        axis.axvline(0, color=GREY, linewidth=0.8)
        axis.set_xscale("symlog", linthresh=1, linscale=0.8)
        ticks = [-100, -10, -1, 0, 1, 10, 100]
        axis.set_xticks(ticks, [signed(tick, 0) if tick else "0" for tick in ticks])
        axis.set_xlim(-100, 160)
        axis.tick_params(axis="x", top=True, labeltop=True)
        axis.tick_params(axis="y", length=0)
        for side in ("left", "right"):
            axis.spines[side].set_visible(False)
        axis.grid(axis="x", color=GREY, alpha=0.2)
        axis.set_xlabel("difference in accuracy, points (linear from −1 to +1, logarithmic beyond)")
        figure.legend(loc="outside upper center", ncols=4, frameon=False)
        save(figure, DOCS / "images" / "forest.png", dpi=140, transparent=True)
    return len(cells), left_out


def main() -> None:
    """Draws the picture and writes the tables."""
    write_tables()
    drawn, left_out = picture()
    print(f"{drawn} cells are drawn, {left_out} left out")


if __name__ == "__main__":
    main()
