"""The curves of a study, and its tables and curves as one page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_fed.lab.report.load import MeasuredRun, Method
from lightning_fed.lab.report.page import html_table, whole_page
from lightning_fed.lab.report.plots import curves_html, panels_figure
from lightning_fed.lab.studies.blocks import Block, column_head
from lightning_fed.lab.studies.results import StudyRun, is_lost
from lightning_fed.lab.studies.table import StudyTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["study_figure", "study_page"]

_MOST_LINES = 14

Panels = dict[tuple[str, str], dict[int, Method]]


def study_figure(table: StudyTable, x: str) -> Figure:
    """Draws a panel for each column of the table and a line with a band for each row, or the other way round."""
    return panels_figure(_panels(table), x)


def study_page(text: Sequence[str], blocks: Sequence[Block], notes: Sequence[str], table: StudyTable, x: str) -> str:
    """Makes a page of a title, sentences, tables as text and notes, and of curves over x to look around in."""
    curves = []
    for index, ((title, metric), methods) in enumerate(_panels(table).items()):
        drawn = curves_html(list(methods.values()), metric, [x], f"curves-{index}")
        curves.append(f"<div><h3>{escape(title)}</h3>{drawn}</div>")
    tables = (
        f"<h2>{escape(block.title)}</h2>\n<p>{escape(block.note)}</p>\n{html_table(block.lines, sortable=True)}"
        for block in blocks
    )
    sentences = (f"<p>{escape(sentence)}</p>" for sentence in (*text[1:], *notes))
    return whole_page(
        text[0], [f"<h1>{escape(text[0])}</h1>", *sentences, *tables, '<div class="curves">', *curves, "</div>"]
    )


def _panels(table: StudyTable) -> Panels:
    """By title and metric the methods by number; of several statistics, and seeds, all are on one curve.

    A run that has diverged is left out, as in the table: its last losses would set the scale for all others.
    """
    line_axes, panel_axes = _sides(table)
    runs: dict[tuple[str, str], dict[str, dict[int, StudyRun]]] = {}
    for cell in table.cells.values():
        line, panel = (column_head(axes, [cell.names[axis] for axis in axes]) for axes in (line_axes, panel_axes))
        seeds = runs.setdefault((panel, cell.names["metric"]), {}).setdefault(line, {})
        seeds.update({run.seed: run for run in cell.runs if not is_lost(run.curves[cell.names["metric"]])})
    numbers = {line: at for at, line in enumerate(dict.fromkeys(line for lines in runs.values() for line in lines))}
    panels = {
        panel: {numbers[line]: _method(line, seeds) for line, seeds in lines.items() if seeds}
        for panel, lines in runs.items()
    }
    return {panel: methods for panel, methods in panels.items() if methods}


def _sides(table: StudyTable) -> tuple[list[str], list[str]]:
    """Returns the axes whose values are lines, and those whose values are panels.

    Methods are lines, and where they are more than colours that tell them apart, those that the baseline names alone.
    """
    axes = [axis for axis in (*table.row_axes, *table.column_axes) if axis not in ("seed", "metric", "statistic")]
    lines = table.column_axes if table.methods_are_columns else table.row_axes
    if table.baseline and len(table.columns if table.methods_are_columns else table.rows) > _MOST_LINES:
        lines = table.baseline
    names = {axis: {cell.names[axis] for cell in table.cells.values()} for axis in axes}
    panels = [axis for axis in axes if axis not in lines and len(names[axis]) > 1]
    return [axis for axis in axes if axis in lines], panels


def _method(label: str, seeds: dict[int, StudyRun]) -> Method:
    runs = (
        MeasuredRun(Path(run.fingerprint), run.fingerprint, "", label, "", seed, "", 0.0, run.curves)
        for seed, run in sorted(seeds.items())
    )
    return Method(label or "all runs", tuple(runs))
