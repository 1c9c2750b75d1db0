"""The curves of a study, by panel, and its interactive page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_fed.core import one_line
from lightning_fed.errors import import_extra
from lightning_fed.lab.common import column_head
from lightning_fed.lab.report import page
from lightning_fed.lab.report.plots import curves_html
from lightning_fed.lab.report.runs import COSTS, MeasuredRun, Method, is_measured
from lightning_fed.lab.studies.formats import Block, paragraphs
from lightning_fed.lab.studies.results import is_lost
from lightning_fed.lab.studies.table import StudyTable, TableCell

__all__ = ["panels_of", "study_page"]


def study_page(
    text: Sequence[str], blocks: Sequence[Block], table: StudyTable, x: str, tuning: Sequence[str] = ()
) -> str:
    """Makes the interactive page of a study.

    It has a title, paragraphs of Markdown, the first table, the curves over x, the other tables and charts of the
    tuning. Of runs with a folder it also shows their other content.
    """
    runs = _runs(table)
    axes = [x, *(name for name in COSTS if runs and name != x and is_measured(runs, name))]
    curves = []
    for index, ((title, metric), methods) in enumerate(panels_of(table).items()):
        heading = f"<h3>{page.coded(title)}</h3>" if title else ""
        curves.append(f"<div>{heading}{curves_html(methods, metric, axes, f'curves-{index}')}</div>")
    body = (
        f"<h1>{page.coded(text[0])}</h1>",
        _rendered(text[1:]),
        _block(blocks[0], table.notes),
        page.section("Curves", page.in_pairs(curves)),
        *map(_block, blocks[1:]),
        page.section("Tuning", page.in_pairs(tuning)),
        *page.details_of_runs(runs, axes, {cell.names["metric"] for cell in table.cells.values()}),
    )
    return page.whole_page(text[0], body)


def _rendered(parts: Sequence[str]) -> str:
    """Renders Markdown; HTML tags in it stay text."""
    parser = import_extra("markdown_it", "html", "`--format html`").MarkdownIt("commonmark", {"html": False})
    html: str = parser.render(paragraphs(map(one_line, parts)))
    return html


def _block(block: Block, notes: Sequence[str] = ()) -> str:
    lines = [f"<h2>{page.coded(block.title)}</h2>", *([f"<p>{page.coded(block.above)}</p>"] if block.above else [])]
    lines.append(page.html_table(block.lines, sortable=True))
    return "\n".join([*lines, *(f"<p>{page.coded(note)}</p>" for note in (block.note, *notes) if note)])


def panels_of(table: StudyTable) -> dict[tuple[str, str], dict[int, Method]]:
    """Returns for each panel, by title and metric, its numbered methods; statistics and seeds share a curve.

    There is a panel for each column of the table and a line for each row, or the reverse. Diverged runs are left out,
    as in the table: their last losses would set the scale for all others.
    """
    line_axes, panel_axes = _sides(table)
    panels: dict[tuple[str, str], dict[str, dict[int, MeasuredRun]]] = {}
    for cell in table.cells.values():
        metric, panel = cell.names["metric"], _label(cell, panel_axes)
        seeds = panels.setdefault((panel, metric), {}).setdefault(_label(cell, line_axes), {})
        seeds.update({run.seed: run.measured for run in cell.runs if not is_lost(run.curves[metric])})
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
    if table.baseline and len(table.columns if table.methods_are_columns else table.rows) > page.MOST_LINES:
        lines = table.baseline
    axes = [axis for axis in (*table.row_axes, *table.column_axes) if axis not in ("seed", "metric", "statistic")]
    return [axis for axis in axes if axis in lines], [axis for axis in _differing(table) if axis not in lines]


def _differing(table: StudyTable) -> list[str]:
    axes = [axis for axis in (*table.row_axes, *table.column_axes) if axis not in ("seed", "metric", "statistic")]
    return [axis for axis in axes if len({cell.names[axis] for cell in table.cells.values()}) > 1]


def _label(cell: TableCell, axes: Sequence[str]) -> str:
    return column_head(axes, [cell.names[axis] for axis in axes])


def _runs(table: StudyTable) -> list[Method]:
    """Returns each combination of values as a method, with its runs that have a folder."""
    axes, methods = _differing(table) or _sides(table)[0], dict[str, dict[int, MeasuredRun]]()
    for cell in table.cells.values():
        found = {run.seed: run.folder for run in cell.runs if run.folder is not None}
        methods.setdefault(_label(cell, axes), {}).update(found)
    return [_method(label, runs) for label, runs in methods.items() if runs]


def _method(label: str, runs: Mapping[int, MeasuredRun]) -> Method:
    return Method(label or "all runs", tuple(runs[seed] for seed in sorted(runs)))
