"""Plots curves of a metric over rounds, communication or time: a line per method, with a band."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from textwrap import fill
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_fed.lab.common import no_mathematics
from lightning_fed.lab.report.budgets import spent
from lightning_fed.lab.report.load import Method
from lightning_fed.lab.report.tables import counted, is_share

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["AXES", "COLOURS", "Curve", "Vector", "curve", "label_of", "limits", "panels_figure"]

# The colours of Okabe and Ito, "Color universal design" (2008), for readers with any colour vision. Their yellow is
# left out, as it is too pale for a line on white. From the eighth method on the line style changes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "D", "^")
AXES = {
    "round": ("round", None),
    "time": ("training time", "s"),
    "samples": ("training samples seen", ""),
    "gradients": ("gradient evaluations, samples", ""),
    "comm/rounds": ("communication rounds", None),
    "comm/bytes": ("sent both ways", "B"),
    "comm/bytes_up": ("sent by the clients", "B"),
    "comm/bytes_down": ("sent to the clients", "B"),
    "simulated/time": ("simulated time", "s"),
}
"""For each x-axis its label and the unit that gets SI prefixes; None for plain numbers."""

Vector: TypeAlias = NDArray[np.float64]
Curve: TypeAlias = tuple[Vector, Vector, Vector | None]


def curve(method: Method, metric: str, x: str = "round") -> Curve:
    """Computes the curve of a method over the R rounds that all its seeds have evaluated.

    Returns:
        Means over seeds of the cost x and of the metric, and the metric's sample standard deviation (None for one
        seed), each of shape (R,).
    """
    rounds = sorted(set.intersection(*(set(run.columns[metric]) for run in method.runs)))
    values = np.array([[run.columns[metric][at] for at in rounds] for run in method.runs], dtype=np.float64)
    places = np.array([spent(run, x, rounds) for run in method.runs], dtype=np.float64)
    with np.errstate(invalid="ignore"):  # a diverged run makes the deviation NaN, so the band ends there
        std = values.std(axis=0, ddof=1) if len(values) > 1 else None
        return places.mean(axis=0), values.mean(axis=0), std


def limits(curves: Collection[Curve], share: bool) -> tuple[float, float] | None:
    """Returns the limits of the axis for points: at least 20 points wide for an accuracy, else from 0.

    Returns None if a curve has two or more values, as these are lines.
    """
    if any(len(mean) > 1 for _, mean, _ in curves):
        return None
    ends = [mean + sign * (0 if std is None else std) for _, mean, std in curves for sign in (-1, 1)]
    known = [value for end in ends for value in end.tolist() if np.isfinite(value)] or [0.0]
    low, high, middle = min(known), max(known), (min(known) + max(known)) / 2
    if share:
        return max(0.0, min(low, middle - 0.1) - 0.02), min(1.0, max(high, middle + 0.1) + 0.02)
    room = 0.05 * (high - low) or 1.0
    return min(0.0, low - room), max(0.0, high + room)


def panels_figure(panels: Mapping[tuple[str, str], Mapping[int, Method]], x: str = "round") -> Figure:
    """Draws a line per method and, from two seeds on, a band of one standard deviation on either side.

    Panels, by title and metric, are in rows of three or five above one legend. The number of a method sets its colour
    in all panels. A metric that all methods measured only once is drawn as points.
    """
    from matplotlib.figure import Figure

    across = max(1, min(3 if len(panels) <= 12 else 5, len(panels)))  # 1 without panels, if all runs diverged
    down = max(1, -(-len(panels) // across))
    wide, high = (3.6, 3.2) if across <= 3 else (2.6, 2.3)
    figure = Figure(figsize=(max(7.0, wide * across), 0.8 + high * down), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False).flat
    banded = False
    handles: dict[str, Artist] = {}
    for ((title, metric), methods), axes in zip(panels.items(), grid, strict=False):
        banded |= _panel(axes, methods, metric, x)
        axes.set_title(no_mathematics(fill(title, int(10 * wide))), fontsize="medium")
        lines, labels = axes.get_legend_handles_labels()
        handles = {**dict(zip(labels, lines, strict=True)), **handles}
    for axes in grid:
        axes.remove()
    names = "mean ± std over seeds" if banded else None
    lines, labels = list(handles.values()), list(handles)
    figure.legend(lines, labels, loc="outside lower center", ncols=min(3, across), title=names, frameon=False)
    return figure


def _panel(axes: Axes, methods: Mapping[int, Method], metric: str, x: str) -> bool:
    """Draws the curves of numbered methods, and tells whether one has a band."""
    curves = {index: curve(method, metric, x) for index, method in methods.items()}
    percent = is_share(metric, [value for _, mean, _ in curves.values() for value in mean.tolist()])
    scale = 100.0 if percent else 1.0
    ends, label = limits(curves.values(), percent), no_mathematics(metric + " (%)" * percent)
    for index, (places, mean, std) in curves.items():
        draw = _point if ends else _draw
        draw(axes, index, methods[index], places, scale * mean, None if std is None else scale * std)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if ends:
        axes.set(xlabel=label, yticks=[], xlim=[scale * end for end in ends])
        axes.margins(y=0.2)
    else:
        axes.set_ylabel(label)
        _label(axes, x)
    return any(std is not None for _, _, std in curves.values())


def _point(axes: Axes, index: int, method: Method, x: Vector, mean: Vector, std: Vector | None) -> None:
    colour, marker = COLOURS[index % len(COLOURS)], _MARKERS[index // len(COLOURS) % len(_MARKERS)]
    label, places = no_mathematics(label_of(method)), np.full(len(mean), -index)
    axes.errorbar(mean, places, xerr=std, fmt=marker, color=colour, capsize=3, label=label)


def _draw(axes: Axes, index: int, method: Method, x: Vector, mean: Vector, std: Vector | None) -> None:
    colour = COLOURS[index % len(COLOURS)]
    style = STYLES[index // len(COLOURS) % len(STYLES)]
    label, marker = no_mathematics(label_of(method)), "o" if len(x) <= 20 else None
    axes.plot(x, mean, style, color=colour, linewidth=1.6, marker=marker, markersize=3.5, label=label, zorder=3)
    if std is not None:
        axes.fill_between(x, mean - std, mean + std, color=colour, alpha=0.22, linewidth=0)
        for edge in (mean - std, mean + std):
            axes.plot(x, edge, color=colour, alpha=0.45, linewidth=0.6)


def label_of(method: Method) -> str:
    """Returns the label of a method with its number of seeds."""
    return f"{method.label} ({counted(len(method.runs), 'seed')})"


def _label(axes: Axes, x: str) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    label, unit = AXES.get(x, (x, None))
    axes.set_xlabel(no_mathematics(label))
    if unit is not None:
        axes.xaxis.set_major_formatter(EngFormatter(unit=unit))
    elif x == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.margins(x=0.01)
