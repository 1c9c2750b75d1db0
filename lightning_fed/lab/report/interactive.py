"""Curves of a page: hover for values, click the legend to hide a method, choose what they are drawn against."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from lightning_fed.lab.common import import_extra
from lightning_fed.lab.report.load import Method
from lightning_fed.lab.report.plots import AXES, COLOURS, Vector, curve
from lightning_fed.lab.report.tables import is_share

__all__ = ["curves_html", "import_plotly"]

_DASHES = ("solid", "dash", "dot", "dashdot")


def import_plotly(part: str) -> Any:
    """Imports a module of plotly, which only a page needs."""
    return import_extra(f"plotly.{part}", "html", "`--format html`")


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
    figure = import_plotly("graph_objects").Figure(traces, layout)
    html: str = figure.to_html(
        config={"displaylogo": False}, full_html=False, include_plotlyjs=False, div_id=name, default_height="100%"
    )
    return html


def _traces(index: int, method: Method, drawn: tuple[Vector, Vector, Vector | None]) -> list[dict[str, Any]]:
    x, mean, std = drawn
    colour, dash = COLOURS[index % len(COLOURS)], _DASHES[index // len(COLOURS) % len(_DASHES)]
    seeds = len(method.runs)
    line = {
        "type": "scatter",
        "mode": "lines+markers" if len(x) <= 20 else "lines",
        "name": f"{_plain(method.label)} ({seeds} seed{'s' if seeds > 1 else ''})",
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
