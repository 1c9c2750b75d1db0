"""Draws what the runs say of each published gain, and writes the table of claims.

    python docs/forest_figure.py

reads docs/results/claims.csv, which names for each claim the cell of a study and the one it is compared with, and the
tables and curves there; writes docs/images/forest.png and the table in docs/results/index.md.
"""

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

from lightning_fed.lab.studies.comparison import PairedDifference, has_settled, is_near, paired_difference, verdict_on
from lightning_fed.lab.studies.results import StudyRun, read_results, value_of_run

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.pyplot import rc_context, subplots
from pictures import save

__all__ = ["Claim", "claims", "main", "table", "written"]

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS / "results"
HEADER = ["| claim | ours, 95 % CI | paper | verdict | page |", "| --- | ---: | ---: | --- | --- |"]
OTHER = "of other data"  # its gain is printed, its level says nothing of ours
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
GREY = "#808080"  # reads on white and on black
COLOURS = {"reproduced": "#009e73", "contradicted": "#d55e00", "undecided": GREY}
PAPER: dict[str, Any] = {"color": "#3b8bd6", "markersize": 9, "markeredgewidth": 2}
GROUPS = {
    "mask/signatures": "Data made for the mask: its direction, by clients that share a feature",
    "mask/noise": "",
    "gma/tables4_5_trained": "GMA, Tables 4 and 5: one round from a model of 86 %, 5 or 2 of 10 clients drawn",
    "gma/tables4_5": "GMA, Tables 4 and 5: one round after 50 rounds",
    "gma/convex": "GMA, appendix E: convex",
    "gma/table2": "GMA, Table 2: data, split, clients, rule",
    "gma/table3_feature_learned": "GMA, Table 3: colours of no client, to a model that has learned",
    "gma/table3_feature_learned_yogi": "GMA, Table 3: the same under FedYogi",
    "gma/table3_feature": "GMA, Table 3: colours of no client, after 30 rounds",
    "gma/plateau": "GMA, Table 6: FashionMNIST, 2 classes, momentum 0.9, 200 rounds",
    "gma/table6": "GMA, Table 6: momentum 0 and 0.9",
    "gma/table8": "GMA, Table 8: clients",
    "gma/table9": "GMA, Table 9: local epochs (a tenth)",
    "gma/table10": "GMA, Table 10: momentum, server and client rate",
}
SHORT = {
    "per_client/acc_in": "in it", "per_client/acc_out": "others", "per_client/acc_weighted": "train",
    "non-IID": "2 classes", "AVG": "FedAvg's model", "each rule": "own models", "dark": "others do not vote",
    "lit at random": "all vote", "test/acc": "test",
}  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """A row of claims.csv, and what the runs say of it."""

    row: dict[str, str]
    difference: PairedDifference | None = None  # in the unit of the metric
    gain: float | None = None  # that the paper has
    verdict: str = ""

    @property
    def scale(self) -> int:
        """100 of a share, which is printed in points."""
        return 100 if any(word in self.row["metric"] for word in ("acc", "agreement")) else 1


def axes_of(text: str) -> dict[str, str]:
    """Reads ``data=MNIST;split=IID``."""
    return dict(part.split("=", 1) for part in text.split(";"))


@cache
def runs_of(folder: str) -> tuple[StudyRun, ...]:
    """Reads the runs of a folder, or the attacks on them."""
    attacks = RESULTS / folder / "attack.csv"
    if not attacks.is_file():
        return read_results(RESULTS / folder).runs
    found = []
    for row in csv.DictReader(attacks.open()):
        axes = {name: row[name] for name in ("rule", "attack")}
        found.append(StudyRun(axes, int(row["seed"]), "", 0, {}, {"accuracy": {0: float(row["accuracy"])}}))
    return tuple(found)


def value(run: StudyRun, metric: str, statistic: str) -> float:
    """Returns a statistic of a run: as reports have it, a difference of two, or the value after some communication."""
    curve = run.curves[metric]
    if statistic.startswith("communication "):
        sent = run.curves["comm/rounds"]
        return next(curve[at] for at in curve if sent.get(at) == float(statistic.split()[1]))
    first, _, second = statistic.partition(" less ")
    return value_of_run(curve, first, metric) - (value_of_run(curve, second, metric) if second else 0.0)


def cell(folder: str, axes: Mapping[str, str]) -> list[StudyRun]:
    """Returns the runs of a cell in the order of their seeds."""
    found = [run for run in runs_of(folder) if axes.items() <= run.axes.items()]
    assert found, (folder, axes)
    return sorted(found, key=lambda run: run.seed)


def published(folder: str, axes: Mapping[str, str], metric: str, statistic: str) -> float | None:
    """Returns the paper's figure of a cell, the mean of its rows; None where there is none."""
    path = RESULTS / folder / "table.csv"
    if not path.is_file():
        return None
    first, _, second = statistic.partition(" less ")
    means = [
        [float(row["published"]) for row in csv.DictReader(path.open())
         if row["published"] and {**axes, "metric": metric, "statistic": name}.items() <= row.items()]
        for name in (first, second)
    ]  # fmt: skip
    return fmean(means[0]) - (fmean(means[1]) if second else 0.0) if means[0] else None


def judged(row: dict[str, str]) -> Claim:
    """Compares the two cells of a claim by the protocol."""
    folder, metric, statistic = row["folder"], row["metric"], row["statistic"]
    ours = axes_of(row["ours"])
    sides = [cell(folder, axes) for axes in (ours, ours | axes_of(row["baseline"]))]
    values = [[value(run, metric, statistic) for run in runs] for runs in sides]
    difference = paired_difference(values[0], values[1])
    if row["published"][:1].isdecimal():
        papers: list[float | None] = [float(one) / 100 for one in row["published"].split("-")]
    else:
        papers = [published(folder, axes, metric, statistic) for axes in (ours, ours | axes_of(row["baseline"]))]
    gain = None if papers[0] is None or papers[1] is None else papers[0] - papers[1]
    # Where neither paper nor study states a gain, any counts.
    least = 1e-12 if row["sign"] in "+-" else float(row["sign"])
    claimed = gain if gain is not None else math.copysign(least, -1 if row["sign"] == "-" else 1)
    scale = 1.0 if "acc" in metric or "agreement" in metric else abs(fmean(values[1]))
    curves = [[run.curves[metric] for run in runs] for runs in sides]
    level = " less " not in statistic and all(has_settled(side, scale) for side in curves)
    if gain is not None and papers[1] is not None and row["published"] != OTHER:
        level = level or is_near(fmean(values[1]), papers[1], scale)
    learned = not row["gate"] or fmean(values[1]) >= float(row["gate"])
    verdict = verdict_on(difference, claimed, level, learned)
    return Claim(row, difference, gain, verdict.word if verdict else "undecided")


def claims() -> Iterator[Claim]:
    """Yields all rows of claims.csv."""
    for row in csv.DictReader((RESULTS / "claims.csv").open()):
        yield judged(row) if row["folder"] else Claim(row, verdict="undecided" if row["ours"] else "not run")


def signed(number: float, digits: int) -> str:
    """Prints a number with its sign, a true minus."""
    return f"{number:+.{digits}f}".replace("-", "−")


def interval(claim: Claim) -> str:
    """Prints a difference and its interval, in points of a share."""
    if claim.difference is None:
        return claim.row["ours"]
    numbers = [claim.scale * number for number in (claim.difference.mean, *claim.difference.t_interval)]
    wide = numbers[2] - numbers[1]
    digits = (1 if wide > 1.5 else 2) if claim.scale == 100 else (1 if wide > 5 else 2 if wide > 0.2 else 3)
    mean, low, high = (signed(number, digits) for number in numbers)
    return f"{mean} ({low} to {high})"


def table() -> str:
    """Returns the table of the index."""
    lines = list(HEADER)
    for claim in claims():
        row = claim.row
        if row["paper"]:
            lines.append(f"| {row['paper']} | | | | |")
        paper = row["published"] if claim.gain is None else signed(100 * claim.gain, 2)
        lines.append(f"| {row['claim']} | {interval(claim)} | {paper} | {claim.verdict} | {row['page']} |")
    return "\n".join(lines).replace("|  |", "| |").replace("|  |", "| |") + "\n"


def written() -> tuple[str, str, str]:
    """Returns the index before its table, the table, and what follows."""
    text = (RESULTS / "index.md").read_text()
    before, rest = text.split(HEADER[0], 1)
    body, _, after = rest.partition("\n\n")
    return before, HEADER[0] + body + "\n", after


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
    kept = [row for row in rows if row["verdict"] and (row["published"] or is_shown(row))]
    names = list(rows[0])[: list(rows[0]).index("seeds")]
    hidden = ("aggregation", "statistic", "rule", "batch size")
    told = [name for name in names if name not in hidden and len({row[name] for row in kept}) > 1]
    lines = [
        Line(
            ", ".join(SHORT.get(row[name], row[name]) for name in told) or row["statistic"],
            100 * float(row["difference"]), (100 * float(row["t_low"]), 100 * float(row["t_high"])),
            100 * float(row["claimed"]), row["verdict"],
        )
        for row in kept if row["verdict"] != "nothing learned"
    ]  # fmt: skip
    return lines, len(kept) - len(lines)


def is_shown(row: Mapping[str, str]) -> bool:
    """Says whether a row of the data made for the mask is in the picture."""
    return row.get("rule") == "GMA at FedAvg's length" and row["statistic"] == "last 10"


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
    """Draws the picture and writes the table."""
    before, _, after = written()
    (RESULTS / "index.md").write_text(before + table() + "\n" + after)
    drawn, left_out = picture()
    print(f"{drawn} cells are drawn, {left_out} left out")


if __name__ == "__main__":
    main()
