"""Charts of an HTML page, drawn by plotly: curves, points and the trials of a tuning."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from html import escape
from textwrap import wrap
from typing import Any, TypeAlias

import numpy as np

from lightning_fed.lab.common import import_extra
from lightning_fed.lab.report.load import Method
from lightning_fed.lab.report.plots import AXES, COLOURS, Curve, Vector, curve, label_of, limits
from lightning_fed.lab.report.tables import is_share

__all__ = ["curves_html", "tuning_html"]

Trials: TypeAlias = Sequence[tuple[str, float]]  # value of the option, result

_DASHES = ("solid", "dash", "dot", "dashdot")
_CLEAR = "rgba(0,0,0,0)"


def curves_html(methods: Mapping[int, Method], metric: str, axes: Sequence[str], name: str) -> str:
    """Draws a line per method and, from two seeds on, a band of one standard deviation on either side.

    The number of a method sets its colour in all charts. A method is left out if one of its runs did not measure the
    metric. If all methods measured it only once, they are points. The reader can choose the axis; the first is shown at
    the start. ``name`` is the id of the element, unique in the page, which must load plotly.js.
    """
    drawn = {i: method for i, method in methods.items() if all(metric in run.columns for run in method.runs)}
    curves = {x: {i: curve(method, metric, x) for i, method in drawn.items()} for x in axes}
    at_first = curves[axes[0]]
    axis = _value_axis(metric, [value for _, mean, _ in at_first.values() for value in mean.tolist()])
    if ends := limits(at_first.values(), "tickformat" in axis):
        axis["range"] = ends
        points = [_point(i, drawn[i], one) for i, one in at_first.items() if len(one[1])]
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


def _point(index: int, method: Method, drawn: Curve) -> dict[str, Any]:
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
    return [{"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.2}] if len(buttons) > 1 else []


def _band_menu(bands: Sequence[bool]) -> list[dict[str, Any]]:
    places = [index for index, band in enumerate(bands) if band]
    # Transparent instead of invisible, so that lines hidden by the legend stay hidden.
    labels = {"bands": 0.25, "no bands": 0}
    buttons = [{"label": label, "method": "restyle", "args": [{"opacity": o}, places]} for label, o in labels.items()]
    menu = {"type": "buttons", "direction": "left", "buttons": buttons, "x": 1, "xanchor": "right", "y": 1.2}
    return [menu] if places else []


def _title(x: str) -> str:
    label, unit = AXES.get(x, (x, None))
    return _plain(label) + (f", {unit}" if unit else "")


def _plain(text: str) -> str:
    # plotly reads tags and some entities in texts, but not the entities of quotation marks.
    return escape(text, quote=False)
