"""A study's curves as a picture, and its interactive page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from lightning_fed.lab.common import import_extra, one_line
from lightning_fed.lab.report.load import MeasuredRun, Method
from lightning_fed.lab.report.page import MOST_LINES, details_of_runs, html_table, section, whole_page
from lightning_fed.lab.report.plots import AXES, curves_html, panels_figure
from lightning_fed.lab.report.tables import is_measured
from lightning_fed.lab.studies.formats import Block, column_head, paragraphs
from lightning_fed.lab.studies.results import StudyRun, is_lost
from lightning_fed.lab.studies.table import StudyTable, TableCell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["study_figure", "study_page"]


def study_figure(table: StudyTable, x: str) -> Figure:
    """Draws a panel for each column of the table and a line with a band for each row, or the reverse."""
    return panels_figure(_panels(table, {}), x)


def study_page(
    text: Sequence[str], blocks: Sequence[Block], table: StudyTable, x: str, tuning: Sequence[str] = (),
    folders: Mapping[str, MeasuredRun] = MappingProxyType({}),
) -> str:  # fmt: skip
    """Makes the interactive page of a study.

    It has a title, paragraphs of Markdown, the first table, the curves over x, the other tables and charts of the
    tuning. For runs whose folders are available (``folders``, by fingerprint) it also shows their other content.
    """
    runs = _runs(table, folders)
    axes = [x, *(name for name in AXES if runs and name != x and is_measured(runs, name))]
    curves = []
    for index, ((title, metric), methods) in enumerate(_panels(table, folders).items()):
        heading = f"<h3>{escape(title)}</h3>" if title else ""
        curves.append(f"<div>{heading}{curves_html(methods, metric, axes, f'curves-{index}')}</div>")
    body = (
        f"<h1>{escape(text[0])}</h1>",
        _markdown(text[1:]),
        _block(blocks[0], table.notes),
        section("Curves", ['<div class="curves">', *curves, "</div>"]),
        *map(_block, blocks[1:]),
        section("Tuning", ['<div class="curves">', *tuning, "</div>"] if tuning else []),
        *details_of_runs(runs, axes, {cell.names["metric"] for cell in table.cells.values()}),
    )
    return whole_page(text[0], body)


def _markdown(parts: Sequence[str]) -> str:
    """Renders Markdown; HTML tags in it stay text."""
    parser = import_extra("markdown_it", "html", "`--format html`").MarkdownIt("commonmark", {"html": False})
    html: str = parser.render(paragraphs(map(one_line, parts)))
    return html


def _block(block: Block, notes: Sequence[str] = ()) -> str:
    lines = [f"<h2>{escape(block.title)}</h2>", *([f"<p>{escape(block.above)}</p>"] if block.above else [])]
    lines.append(html_table(block.lines, sortable=True))
    return "\n".join([*lines, *(f"<p>{escape(note)}</p>" for note in (block.note, *notes) if note)])


def _panels(table: StudyTable, folders: Mapping[str, MeasuredRun]) -> dict[tuple[str, str], dict[int, Method]]:
    """Returns for each panel, by title and metric, its numbered methods; statistics and seeds share a curve.

    Diverged runs are left out, as in the table: their last losses would set the scale for all others.
    """
    line_axes, panel_axes = _sides(table)
    panels: dict[tuple[str, str], dict[str, dict[int, MeasuredRun]]] = {}
    for cell in table.cells.values():
        metric, panel = cell.names["metric"], _label(cell, panel_axes)
        seeds = panels.setdefault((panel, metric), {}).setdefault(_label(cell, line_axes), {})
        seeds.update({run.seed: _measured(run, folders) for run in cell.runs if not is_lost(run.curves[metric])})
    numbers = {line: at for at, line in enumerate(dict.fromkeys(line for lines in panels.values() for line in lines))}
    return {
        panel: {numbers[name]: _method(name, runs) for name, runs in lines.items() if runs}
        for panel, lines in panels.items()
        if any(lines.values())
    }


def _sides(table: StudyTable) -> tuple[list[str], list[str]]:
    """Returns the axes whose values are lines, and the axes whose values are panels.

    Methods are lines. If there are more methods than distinct colours, only the axes of the baseline are lines.
    """
    lines = table.column_axes if table.methods_are_columns else table.row_axes
    if table.baseline and len(table.columns if table.methods_are_columns else table.rows) > MOST_LINES:
        lines = table.baseline
    axes = [axis for axis in (*table.row_axes, *table.column_axes) if axis not in ("seed", "metric", "statistic")]
    return [axis for axis in axes if axis in lines], [axis for axis in _differing(table) if axis not in lines]


def _differing(table: StudyTable) -> list[str]:
    axes = [axis for axis in (*table.row_axes, *table.column_axes) if axis not in ("seed", "metric", "statistic")]
    return [axis for axis in axes if len({cell.names[axis] for cell in table.cells.values()}) > 1]


def _label(cell: TableCell, axes: Sequence[str]) -> str:
    return column_head(axes, [cell.names[axis] for axis in axes])


def _measured(run: StudyRun, folders: Mapping[str, MeasuredRun]) -> MeasuredRun:
    """Returns a run with all its columns if its folder is available, else with the columns of the tables."""
    name = run.fingerprint
    return folders.get(name) or MeasuredRun(Path(name), name, "", "", "", run.seed, "", 0.0, run.curves)


def _runs(table: StudyTable, folders: Mapping[str, MeasuredRun]) -> list[Method]:
    """Returns each combination of values as a method, with its runs whose folders are available."""
    axes, methods = _differing(table), dict[str, dict[int, MeasuredRun]]()
    for cell in table.cells.values():
        found = {run.seed: folders[run.fingerprint] for run in cell.runs if run.fingerprint in folders}
        methods.setdefault(_label(cell, axes), {}).update(found)
    return [_method(label, runs) for label, runs in methods.items() if runs]


def _method(label: str, runs: Mapping[int, MeasuredRun]) -> Method:
    return Method(label or "all runs", tuple(runs[seed] for seed in sorted(runs)))
