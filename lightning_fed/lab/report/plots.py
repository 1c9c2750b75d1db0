"""Draws curves of a metric over rounds, communication or time: as a picture, or for a page, where plotly draws them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from html import escape
from textwrap import fill, wrap
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_fed.core.files import png
from lightning_fed.errors import import_extra
from lightning_fed.lab.common import no_mathematics
from lightning_fed.lab.report.runs import Method, axis_label, counted, is_share, spent
from lightning_fed.runs.statistics import known_goal

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "KINDS", "curve", "curves_html", "limits", "panels_figure", "picture", "tuning_html"]

# The colours of Okabe and Ito, "Color universal design" (2008), for readers with any colour vision. Their yellow is
# left out, as it is too pale for a line on white. From the eighth method on the line style changes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "D", "^")
_DASHES = ("solid", "dash", "dot", "dashdot")
KINDS = ("png", "pdf", "svg")
"""The formats of a picture."""
_PAPER, _NARROW = 8, 1.6  # points of a letter, and inches of a panel, in a picture for a paper
_CLEAR = "rgba(0,0,0,0)"
_ABOVE = {"y": 1.01, "yanchor": "bottom", "pad": {"b": 4}}  # a menu just above the curves, however high they are
Vector: TypeAlias = NDArray[np.float64]
Curve: TypeAlias = tuple[Vector, Vector, Vector | None]
Panels: TypeAlias = Mapping[tuple[str, str], Mapping[int, Method]]  # by title and metric, the numbered methods
Trials: TypeAlias = Sequence[tuple[str, float]]  # value of the option, result


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


def picture(panels: Panels, x: str, kind: str, width: float | None = None) -> bytes:
    """Draws panels as ``png``, ``pdf`` or ``svg``: the same bytes each time, with texts of vectors as text.

    With a ``width``, in inches, letters have the size that papers print, and a PNG as many dots.
    """
    from matplotlib import rc_context

    style: dict[Any, Any] = {"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "lightning_fed"}
    if width:
        small = ("xtick.labelsize", "ytick.labelsize", "legend.fontsize")
        style |= {"font.size": _PAPER, **dict.fromkeys(small, "small")}
    with rc_context(style):
        return png(panels_figure(panels, x, width), 300 if width else 150, kind)


def panels_figure(panels: Panels, x: str = "round", width: float | None = None) -> Figure:
    """Draws a line per method and, from two seeds on, a band of one standard deviation on either side.

    Panels, by title and metric, are in rows of three or five above one legend, in a ``width`` of as many as are
    readable. The number of a method sets its colour in all panels. A metric that all methods measured only once is
    drawn as points.
    """
    from matplotlib.figure import Figure

    across, wide, high, columns, below = _shape(panels, width)
    down = max(1, -(-len(panels) // across))
    figure = Figure(figsize=(width or max(7.0, wide * across), below + high * down), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False).flat
    banded = False
    handles: dict[str, Artist] = {}
    for ((title, metric), methods), axes in zip(panels.items(), grid, strict=False):
        banded |= _panel(axes, methods, metric, x)
        axes.set_title(no_mathematics(fill(title, int((13 if width else 10) * wide))), fontsize="medium")
        if width:
            axes.locator_params(axis="x", nbins=max(3, int(3 * wide)))
            if len(label := axes.get_ylabel()) > 14 * high:
                axes.set_ylabel(label.replace("/", "/\n"))
        lines, labels = axes.get_legend_handles_labels()
        handles = {**dict(zip(labels, lines, strict=True)), **handles}
    for axes in grid:
        axes.remove()
    names = "mean ± std over seeds" if banded else None
    lines = list(handles.values())
    figure.legend(lines, list(handles), loc="outside lower center", ncols=columns, title=names, frameon=False)
    return figure


def _shape(panels: Panels, width: float | None) -> tuple[int, float, float, int, float]:
    """Returns the panels in a row, the inches of a panel, the columns of the legend and the inches of its room."""
    across = max(1, min(3 if len(panels) <= 12 else 5, len(panels)))  # 1 without panels, if all runs diverged
    if width is None:
        return (across, 3.6, 3.2, across, 0.8) if across <= 3 else (across, 2.6, 2.3, 3, 0.8)
    labels = {label_of(method) for methods in panels.values() for method in methods.values()}
    across = min(across, max(1, int(width / _NARROW)))
    columns = max(1, int(width / (0.5 + 0.06 * max(map(len, labels), default=1))))
    return across, width / across, min(0.8 * width / across, 2.6), columns, 0.4 + 0.15 * -(-len(labels) // columns)


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

    label, unit = axis_label(x)
    axes.set_xlabel(no_mathematics(label))
    if unit is not None:
        axes.xaxis.set_major_formatter(EngFormatter(unit=unit))
    elif x == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.margins(x=0.01)


def curves_html(methods: Mapping[int, Method], metric: str, axes: Sequence[str], name: str) -> str:
    """Draws a line per method and, from two seeds on, a band of one standard deviation on either side.

    The number of a method sets its colour in all charts. A method is left out if one of its runs did not measure the
    metric. If all methods measured it only once, they are points. The reader can choose the axis; the first is shown at
    the start. The goal stands beside the metric, if its name or a run tells it. ``name`` is the id of the element,
    unique in the page, which must load plotly.js.
    """
    drawn = {i: method for i, method in methods.items() if all(metric in run.columns for run in method.runs)}
    curves = {x: {i: curve(method, metric, x) for i, method in drawn.items()} for x in axes}
    at_first = curves[axes[0]]
    axis = _value_axis(metric, [value for _, mean, _ in at_first.values() for value in mean.tolist()])
    told = (run.goals.get(metric) for method in drawn.values() for run in method.runs)
    goal = known_goal(metric, next(filter(None, told), None))
    axis["title"]["text"] += {"min": ", less is better", "max": ", more is better", None: ""}[goal]
    if ends := limits(at_first.values(), "tickformat" in axis):
        axis["range"] = ends
        points = [_point_trace(i, drawn[i], one) for i, one in at_first.items() if len(one[1])]
        return _html(points, {"xaxis": axis, "yaxis": {"autorange": "reversed", "automargin": True}}, name, False)
    traces = [trace for i, one in at_first.items() for trace in _traces(i, drawn[i], one)]
    layout = {
        "hovermode": "x unified", "yaxis": axis,
        "xaxis": {"title": {"text": _title(axes[0])}, "exponentformat": "SI", "rangemode": "tozero"},
        "updatemenus": [*_axis_menu(curves), *_band_menu([trace["fill"] == "toself" for trace in traces])],
    }  # fmt: skip
    return _html(traces, layout, name)


def tuning_html(lines: Mapping[str, Trials], chosen: Trials, option: str, metric: str, name: str) -> str:
    """Draws the results of trials over the values of a tuned option, with a line for each setting of the others.

    The chosen trial has a ring. For ``name`` see ``curves_html``.
    """
    axis: dict[str, Any] = {"title": {"text": _plain(option)}, "type": "category"}
    with suppress(ValueError):
        tried = sorted({float(word) for line in lines.values() for word, _ in line})
        axis["type"] = "log" if tried[0] > 0 and tried[-1] >= 10 * tried[0] else "linear"
        axis |= {"tickvals": tried, "ticktext": [f"{at:g}" for at in tried]} if len(tried) <= 8 else {}
    place: Callable[[str], Any] = str if axis["type"] == "category" else float
    ring = {"symbol": "circle-open", "size": 18, "color": "#808080", "line": {"width": 3}}
    traces: list[dict[str, Any]] = [{"mode": "lines+markers", "line": _line(at)} for at in range(len(lines))]
    traces.append({"mode": "markers", "marker": ring})
    for trace, (label, line) in zip(traces, (*lines.items(), ("chosen", chosen)), strict=True):
        points = sorted((place(word), value) for word, value in line)
        trace |= {"type": "scatter", "name": _plain(label), "x": [x for x, _ in points], "y": [y for _, y in points]}
    values = [value for line in lines.values() for _, value in line]
    return _html(traces, {"xaxis": axis, "yaxis": _value_axis(metric, values)}, name, len(lines) <= len(COLOURS))


def _html(traces: Sequence[dict[str, Any]], layout: Mapping[str, Any], name: str, legend: bool = True) -> str:
    # The page sets the colours of texts and grids, as it knows whether it is dark.
    common = {
        "template": "none", "paper_bgcolor": _CLEAR, "plot_bgcolor": _CLEAR, "margin": {"t": 70, "r": 20},
        "showlegend": legend, "legend": {"orientation": "h", "y": -0.35, "bgcolor": _CLEAR},
        "modebar": {"bgcolor": _CLEAR},
    }  # fmt: skip
    figure = import_extra("plotly.graph_objects", "html", "`--format html`").Figure(list(traces), {**common, **layout})
    config = {"displaylogo": False, "responsive": True}
    html = figure.to_html(config, full_html=False, include_plotlyjs=False, div_id=name, default_height="100%")
    return f'<div class="chart">{html}</div>'


def _value_axis(metric: str, values: Sequence[float]) -> dict[str, Any]:
    percent = {"tickformat": "~%", "hoverformat": ".2%"} if is_share(metric, values) else {}
    return {"title": {"text": _plain(metric)}, "automargin": True, **percent}


def _line(index: int) -> dict[str, str]:
    colour = COLOURS[index % len(COLOURS)]
    # Black lines are invisible on a dark page.
    return {"color": colour.replace("#000000", "#808080"), "dash": _DASHES[index // len(COLOURS) % len(_DASHES)]}


def _point_trace(index: int, method: Method, drawn: Curve) -> dict[str, Any]:
    _, mean, std = drawn
    point = {"type": "scatter", "mode": "markers", "marker": {"color": _line(index)["color"], "size": 10}}
    error = {} if std is None else {"error_x": {"array": _short(std)}}
    return {**point, **error, "x": _short(mean), "y": ["<br>".join(map(_plain, wrap(label_of(method), 24)))]}


def _traces(index: int, method: Method, drawn: Curve) -> list[dict[str, Any]]:
    x, mean, std = drawn
    look, mode = _line(index), "lines+markers" if len(x) <= 20 else "lines"
    line = {
        "type": "scatter", "mode": mode, "name": _plain(label_of(method)), "legendgroup": str(index), "line": look,
        "fill": "none", "x": _short(x), "y": _short(mean),
    }  # fmt: skip
    if std is None:
        return [line]
    outline = {"x": _outline(x, x, std), "y": _outline(mean + std, mean - std, std), "line": {**look, "width": 0}}
    band = {
        **line, **outline, "mode": "lines", "fill": "toself", "opacity": 0.25, "fillcolor": look["color"],
        "showlegend": False, "hoverinfo": "skip",
    }  # fmt: skip
    return [band, line]


def _outline(there: Vector, back: Vector, std: Vector) -> list[float]:
    known = np.isfinite(std)
    return _short(np.concatenate([there[known], back[known][::-1]]))


def _short(values: Vector) -> list[float]:
    # A screen shows fewer than six digits, and all digits would make the page several times as large.
    return [float(f"{value:.6g}") for value in values.tolist()]


def _axis_menu(curves: dict[str, dict[int, Curve]]) -> list[dict[str, Any]]:
    buttons = []
    for x, drawn in curves.items():
        places: list[list[float]] = []
        for at, _, std in drawn.values():
            places += [_short(at)] if std is None else [_outline(at, at, std), _short(at)]
        args = [{"x": places}, {"xaxis.title.text": _title(x), "xaxis.autorange": True}]
        buttons.append({"label": _plain(x), "method": "update", "args": args})
    return [{"buttons": buttons, "x": 0, "xanchor": "left", **_ABOVE}] if len(buttons) > 1 else []


def _band_menu(bands: Sequence[bool]) -> list[dict[str, Any]]:
    places = [index for index, band in enumerate(bands) if band]
    # Transparent instead of invisible, so that lines hidden by the legend stay hidden. A second click takes it back.
    off, on = [{"opacity": 0}, places], [{"opacity": 0.25}, places]
    button = {"label": "no bands", "method": "restyle", "args": off, "args2": on}
    menu = {"type": "buttons", "active": -1, "buttons": [button], "x": 1, "xanchor": "right", **_ABOVE}
    return [menu] if places else []


def _title(x: str) -> str:
    label, unit = axis_label(x)
    return _plain(label) + (f", {unit}" if unit else "")


def _plain(text: str) -> str:
    # plotly reads tags and some entities in texts, but not the entities of quotation marks.
    return escape(text, quote=False)
