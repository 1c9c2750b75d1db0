"""Curves of a metric over rounds, communication or time, as a picture or on a page: a line per method, with a band."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from html import escape
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightning_fed.lab.common import import_extra, no_mathematics
from lightning_fed.lab.report.budgets import spent
from lightning_fed.lab.report.load import Method
from lightning_fed.lab.report.tables import is_share

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["AXES", "COLOURS", "curve", "curves_figure", "curves_html", "panels_figure", "png"]

# The colours of Okabe and Ito, "Color universal design" (2008), which readers with any colour vision tell apart; the
# yellow, too pale for a line on white, is left out. Beyond seven methods the line style changes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":", "-.")
_DASHES = ("solid", "dash", "dot", "dashdot")
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
"""What curves are drawn against: its label and the unit behind SI prefixes, None for plain numbers."""

Vector = NDArray[np.float64]


def curve(method: Method, metric: str, x: str = "round") -> tuple[Vector, Vector, Vector | None]:
    """Computes the curve of a method over the R rounds that all its seeds evaluated.

    Returns:
        Mean over seeds of what the runs have spent of x and of the metric, and the metric's sample standard deviation
        (None for one seed), each of shape (R,).
    """
    rounds = sorted(set.intersection(*(set(run.columns[metric]) for run in method.runs)))
    values = np.array([[run.columns[metric][at] for at in rounds] for run in method.runs], dtype=np.float64)
    places = np.array([spent(run, x, rounds) for run in method.runs], dtype=np.float64)
    with np.errstate(invalid="ignore"):  # a diverged run makes the deviation NaN, and the band ends there
        std = values.std(axis=0, ddof=1) if len(values) > 1 else None
    return places.mean(axis=0), values.mean(axis=0), std


def curves_figure(methods: Sequence[Method], metric: str, x: str = "round") -> Figure:
    """Draws one line per method and, from two seeds on, a band of one standard deviation to either side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.4), layout="constrained")
    axes = figure.add_subplot()
    banded = _panel(axes, dict(enumerate(methods)), metric, x)
    axes.legend(title="mean ± std over seeds" if banded else None, frameon=False)
    return figure


def panels_figure(panels: Mapping[tuple[str, str], Mapping[int, Method]], x: str = "round") -> Figure:
    """Draws such curves side by side, three or five in a row, under one legend.

    Panels are methods by number, which gives a method the same colour everywhere, by title and metric.
    """
    from matplotlib.figure import Figure

    across = max(1, min(3 if len(panels) <= 12 else 5, len(panels)))  # one place for no panel, where all have diverged
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
    """Draws the curves of methods by number, and tells whether one has a band."""
    curves = {index: curve(method, metric, x) for index, method in methods.items()}
    percent = is_share(metric, [value for _, mean, _ in curves.values() for value in mean.tolist()])
    scale = 100.0 if percent else 1.0
    for index, (places, mean, std) in curves.items():
        _draw(axes, index, methods[index], places, scale * mean, None if std is None else scale * std)
    _label(axes, metric + (" (%)" if percent else ""), x)
    return any(std is not None for _, _, std in curves.values())


def _draw(axes: Axes, index: int, method: Method, x: Vector, mean: Vector, std: Vector | None) -> None:
    colour = COLOURS[index % len(COLOURS)]
    style = STYLES[index // len(COLOURS) % len(STYLES)]
    label, marker = no_mathematics(_with_seeds(method)), "o" if len(x) <= 20 else None
    axes.plot(x, mean, style, color=colour, linewidth=1.6, marker=marker, markersize=3.5, label=label, zorder=3)
    if std is not None:
        axes.fill_between(x, mean - std, mean + std, color=colour, alpha=0.22, linewidth=0)
        for edge in (mean - std, mean + std):
            axes.plot(x, edge, color=colour, alpha=0.45, linewidth=0.6)


def _with_seeds(method: Method) -> str:
    return f"{method.label} ({len(method.runs)} seed{'s' if len(method.runs) > 1 else ''})"


def _label(axes: Axes, y_label: str, x: str) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    label, unit = AXES.get(x, (x, None))
    axes.set_xlabel(no_mathematics(label))
    axes.set_ylabel(no_mathematics(y_label))
    if unit is not None:
        axes.xaxis.set_major_formatter(EngFormatter(unit=unit))
    elif x == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)


def png(figure: Figure) -> bytes:
    """Draws a figure as a PNG file."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150)
    return drawn.getvalue()


def curves_html(methods: Sequence[Method], metric: str, axes: Sequence[str], name: str) -> str:
    """Draws a line per method and, from two seeds on, a band of one standard deviation to either side.

    Methods of which a run did not measure the metric are not drawn. It can be drawn against each of the axes, the first
    one at the start. The element, of a name that is unique in the page, and its script expect plotly.js there.
    """
    drawn = {i: method for i, method in enumerate(methods) if all(metric in run.columns for run in method.runs)}
    curves = {x: [curve(method, metric, x) for method in drawn.values()] for x in axes}
    at_first = zip(drawn.items(), curves[axes[0]], strict=True)
    traces = [trace for (index, method), drawing in at_first for trace in _traces(index, method, drawing)]
    share = is_share(metric, [value for _, mean, _ in curves[axes[0]] for value in mean.tolist()])
    layout = {
        "template": "plotly_white",
        "hovermode": "x unified",
        "margin": {"t": 70, "r": 20},
        "xaxis": {"title": {"text": _title(axes[0])}, "exponentformat": "SI", "rangemode": "tozero"},
        "yaxis": {"title": {"text": _plain(metric)}} | ({"tickformat": "~%", "hoverformat": ".2%"} if share else {}),
        "showlegend": True,
        "legend": {"orientation": "h", "y": -0.25},
        "updatemenus": [*_axis_menu(curves), *_band_menu([trace["fill"] == "toself" for trace in traces])],
    }
    figure = import_extra("plotly.graph_objects", "html", "`--format html`").Figure(traces, layout)
    html: str = figure.to_html(
        config={"displaylogo": False}, full_html=False, include_plotlyjs=False, div_id=name, default_height="100%"
    )
    return html


def _traces(index: int, method: Method, drawn: tuple[Vector, Vector, Vector | None]) -> list[dict[str, Any]]:
    x, mean, std = drawn
    colour, dash = COLOURS[index % len(COLOURS)], _DASHES[index // len(COLOURS) % len(_DASHES)]
    line = {
        "type": "scatter",
        "mode": "lines+markers" if len(x) <= 20 else "lines",
        "name": _plain(_with_seeds(method)),
        "legendgroup": str(index),
        "line": {"color": colour, "dash": dash},
        "fill": "none",
        "x": _short(x),
        "y": _short(mean),
    }
    if std is None:
        return [line]
    band = {
        **line,
        "mode": "lines",
        "line": {"color": colour, "width": 0},
        "fill": "toself",
        "opacity": 0.25,
        "fillcolor": colour,
        "showlegend": False,
        "hoverinfo": "skip",
        "x": _outline(x, x, std),
        "y": _outline(mean + std, mean - std, std),
    }
    return [band, line]


def _outline(there: Vector, back: Vector, std: Vector) -> list[float]:
    known = np.isfinite(std)
    return _short(np.concatenate([there[known], back[known][::-1]]))


def _short(values: Vector) -> list[float]:
    # Six digits are more than a screen shows; all of them would make the page several times as large.
    return [float(f"{value:.6g}") for value in values.tolist()]


def _axis_menu(curves: dict[str, list[tuple[Vector, Vector, Vector | None]]]) -> list[dict[str, Any]]:
    buttons = []
    for x, drawn in curves.items():
        places: list[list[float]] = []
        for at, _, std in drawn:
            places += [_short(at)] if std is None else [_outline(at, at, std), _short(at)]
        args = [{"x": places}, {"xaxis.title.text": _title(x), "xaxis.autorange": True}]
        buttons.append({"label": _plain(x), "method": "update", "args": args})
    return [{"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.2}] if len(buttons) > 1 else []


def _band_menu(bands: Sequence[bool]) -> list[dict[str, Any]]:
    places = [index for index, band in enumerate(bands) if band]
    # Made transparent, not invisible: what the legend hides stays hidden.
    labels = {"bands": 0.25, "no bands": 0}
    buttons = [{"label": label, "method": "restyle", "args": [{"opacity": o}, places]} for label, o in labels.items()]
    menu = {"type": "buttons", "direction": "left", "buttons": buttons, "x": 0.4, "xanchor": "left", "y": 1.2}
    return [menu] if places else []


def _title(x: str) -> str:
    label, unit = AXES.get(x, (x, None))
    return _plain(label) + (f", {unit}" if unit else "")


def _plain(text: str) -> str:
    # plotly reads tags and some entities in its texts, but not those of quotation marks.
    return escape(text, quote=False)
