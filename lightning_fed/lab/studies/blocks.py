"""A study's table as tables of text and curves, and these as Markdown, LaTeX, a picture and a page."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from lightning_fed.lab.common import one_line
from lightning_fed.lab.report.load import MeasuredRun, Method
from lightning_fed.lab.report.page import html_table, whole_page
from lightning_fed.lab.report.plots import curves_html, panels_figure
from lightning_fed.lab.report.tables import is_share, summarize
from lightning_fed.lab.studies.results import StudyResults, StudyRun, Trial, is_lost
from lightning_fed.lab.studies.study import Study, tuned_per
from lightning_fed.lab.studies.table import StudyTable, TableCell
from lightning_fed.lab.studies.verdict import Verdict, pairs_needed, visible_gain
from lightning_fed.runs.statistics import lower_is_better

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Block", "as_latex", "as_markdown", "column_head", "heading", "study_blocks", "study_figure", "study_page",
    "table_lines",
]  # fmt: skip

_LEVELS = (0.001, 0.01, 0.05)
_MOST_LINES = 14
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": "$<$", ">": "$>$", "|": r"\textbar{}",
}  # fmt: skip


@dataclass(frozen=True)
class Block:
    """One table of text, with a title and a note on how it is read."""

    title: str
    lines: list[list[str]]  # header and rows
    labels: int  # how many columns at the left are names, not numbers
    note: str = ""


def heading(study: Study, results: StudyResults) -> list[str]:
    """Returns the title and sentences on where the study is from and what was run."""
    profile = study.profiles.get(results.profile)
    size = f"Profile `{results.profile}`" + (f": {profile.why}." if profile and profile.why else ".")
    opened = [f"Left open by the source: {'; '.join(one.rstrip('.') for one in study.open)}."] if study.open else []
    return [study.title, *([f"Source: {study.source}."] if study.source else []), *opened, size]


def study_blocks(study: Study, results: StudyResults, table: StudyTable, published: str = "") -> list[Block]:
    """Makes the tables of a study; ``published`` names the source of the figures beside its own."""
    blocks = [_main(study, table, published)]
    if any(cell.difference for cell in table.cells.values()):
        blocks.append(_differences(study, table))
    if study.report.target is not None:
        title = f"Rounds until {study.report.metric[0]} is as good as {study.report.target:g}, mean ± std over seeds"
        blocks.append(
            _matrix(table, title, lambda cell: cell.to_target.text(len(cell.runs), False) if cell.to_target else "")
        )
    if results.trials:
        blocks.append(_tuning(study, results.trials))
    return blocks


def _main(study: Study, table: StudyTable, published: str) -> Block:
    units = {cell.names["metric"] + " (%)" * cell.percent for cell in table.cells.values()}
    seeds = sorted({len(cell.runs) for cell in table.cells.values()})
    count = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    over = "one seed" if seeds == [1] else f"mean ± std over {count} seeds"
    title = f"{', '.join(sorted(units))}, {', '.join(study.report.statistic)}, {over}"
    notes = []
    if any(cell.published for cell in table.cells.values()):
        notes.append(f"In brackets: {published}, and our difference to it.")
    if any(_stars(cell.p_holm) for cell in table.cells.values()):
        notes.append(f"*, **, ***: other than {_baseline(study)} at the level 0.05, 0.01, 0.001 after Holm.")
    block = _matrix(table, title, _value, " ".join(notes))
    ranks = [f"{rank:.2f}" for rank in table.ranks or ()]
    if ranks and table.methods_are_columns:
        block.lines.append(["average rank", *[""] * (block.labels - 1), *ranks])
    elif ranks:
        for line, cell in zip(block.lines, ["average rank", *ranks], strict=True):
            line.append(cell)
    return block


def _baseline(study: Study) -> str:
    return ", ".join(f"{axis} {value}" for axis, value in study.report.baseline.items())


def _differences(study: Study, table: StudyTable) -> Block:
    names = ["difference", "95 % interval (t)", "95 % interval (bootstrap)", "p (Holm)", "seeds", "seen at 80 % power"]
    judged = any(cell.verdict for cell in table.cells.values())
    names += ["claimed", "seeds to see it", "verdict"] * judged
    lines = [[*table.row_axes, *table.column_axes, *names]]
    for (row, column), cell in table.cells.items():
        if (found := cell.difference) is None:
            continue
        intervals = [
            "" if math.isnan(low) else f"[{_signed(low, cell.percent)}, {_signed(high, cell.percent)}]"
            for low, high in (found.t_interval, found.bootstrap)
        ]
        p_value = "" if math.isnan(cell.p_holm) else f"{cell.p_holm:.3f}" if cell.p_holm >= 0.001 else "< 0.001"
        seen = visible_gain(found.std, found.pairs)
        line = [*row, *column, _signed(found.mean, cell.percent), *intervals, p_value, str(found.pairs)]
        line.append(_signed(seen, cell.percent).lstrip("+"))
        if judged:
            line += ["", "", ""] if cell.verdict is None else _judged(cell.verdict, found.std, cell.percent)
        lines.append(line)
    note = "Paired by seed; the test is a paired t-test, adjusted for all different ones of the table."
    shown = {cell.percent for cell in table.cells.values()}
    unit = ", percentage points" + (" where in %" if False in shown else "") if True in shown else ""
    title = f"Difference to {_baseline(study)}{unit}"
    return Block(title, lines, len(lines[0]) - len(names), note)


def _judged(verdict: Verdict, std: float, percent: bool) -> list[str]:
    needed = pairs_needed(verdict.claimed, std)
    return [_signed(verdict.claimed, percent), f"{needed:,}" if needed else "", verdict.word]


def _matrix(table: StudyTable, title: str, text: Callable[[TableCell], str], note: str = "") -> Block:
    heads = [column_head(table.column_axes, column) for column in table.columns]
    lines = [[*table.row_axes, *(heads if table.column_axes else [""])]]
    for row in table.rows:
        cells = (table.cells.get((row, column)) for column in table.columns)
        lines.append([*row, *("" if cell is None else text(cell) for cell in cells)])
    return Block(title, lines, len(table.row_axes), note)


def column_head(axes: Sequence[str], column: Iterable[str]) -> str:
    """Names a column by its values; a number is named with its axis, which a name like MNIST needs not."""
    named = zip(axes, column, strict=True)
    plain = re.compile(r"true|false|null|[-+]?[\d.]+(e[-+]?\d+)?")
    return ", ".join(f"{axis} {value}" if plain.fullmatch(value) else value for axis, value in named)


def _value(cell: TableCell) -> str:
    """Writes the mean over seeds, without those that have diverged, and the published figure."""
    left = [value for value in cell.values if not math.isnan(value)]
    count = "" if len(left) == len(cell.values) else f" ({len(left)} of {len(cell.values)} seeds)"
    lost = "diverged" if cell.is_lost else ""
    text = lost or summarize(left).text(len(left), cell.percent) + count + _stars(cell.p_holm)
    figure = cell.published
    if figure is None:
        return text
    theirs = f"{figure.value:.2f}" + ("" if figure.std is None else f" ± {figure.std:.2f}")
    ours = (100 if cell.percent else 1) * cell.summary.mean
    return f"{text} [{theirs}]" if math.isnan(ours) else f"{text} [{theirs}, {ours - figure.value:+.2f}]"


def _stars(p_value: float) -> str:
    return "*" * sum(p_value < level for level in _LEVELS)


def _signed(value: float, percent: bool) -> str:
    if math.isnan(value):
        return ""
    return f"{100 * value:+.2f}" if percent else f"{value:+.3g}"


def _tuning(study: Study, trials: Sequence[Trial]) -> Block:
    """What was chosen by the metric that decides, and what each other value of the trials would have chosen."""
    axes = tuned_per(study)
    names = list(dict.fromkeys(name for trial in trials for name in trial.values))
    groups: dict[tuple[str, ...], dict[str, list[Trial]]] = {}
    for trial in trials:
        options = ", ".join(f"{option} {value}" for option, value in trial.options.items())
        key = tuple(trial.axes.get(axis, "") for axis in axes)
        groups.setdefault(key, {}).setdefault(options, []).append(trial)
    lines = [[*axes, *(word for name in names for word in (f"by {name}", name))]]
    for key, attempts in groups.items():
        best = (_best(name, attempts) for name in names)
        lines.append([*key, *(word for pair in best for word in pair)])
    seeds = len(study.tune.seeds)
    over = "one seed" if seeds == 1 else f"mean over {seeds} seeds"
    note = f"The runs have what stands first, the choice by {names[0]}, {over}."
    return Block("Tuned options", lines, len(axes), note)


def _best(name: str, attempts: Mapping[str, Sequence[Trial]]) -> tuple[str, str]:
    """Returns the options whose mean over all their runs is best, the first of equals, and that mean."""
    most = max(map(len, attempts.values()))
    values = {
        options: fmean([trial.values[name] for trial in trials])
        for options, trials in attempts.items()
        if len(trials) == most and all(math.isfinite(trial.values.get(name, math.nan)) for trial in trials)
    }
    if not values:
        return "", ""
    choice = (min if lower_is_better(name) else max)(values, key=values.__getitem__)
    return choice, f"{100 * values[choice]:.2f} %" if is_share(name, [values[choice]]) else f"{values[choice]:.4g}"


def table_lines(table: StudyTable) -> list[list[str]]:
    """Returns the table with a line for each cell and numbers as they were measured, accuracies in [0, 1]."""
    axes = list(dict.fromkeys([*table.row_axes, *table.column_axes, "metric", "statistic"]))
    lines = [[*axes, *_COLUMNS]]
    methods = table.columns if table.methods_are_columns else table.rows
    ranks = dict(zip(methods, table.ranks or [None] * len(methods), strict=True))
    for (row, column), cell in table.cells.items():
        rank = ranks[column if table.methods_are_columns else row]
        lines.append([*(cell.names[axis] for axis in axes), *_numbers(cell, rank)])
    return lines


_COLUMNS = (
    "seeds", "mean", "std", "difference", "t_low", "t_high", "bootstrap_low", "bootstrap_high", "p", "p_holm",
    "average_rank", "published", "published_std", "rounds_to_target", "rounds_to_target_std", "std_difference",
    "visible_gain", "claimed", "seeds_needed", "verdict",
)  # fmt: skip


def _numbers(cell: TableCell, rank: float | None) -> list[str]:
    difference, figure, reached = cell.difference, cell.published, cell.to_target
    scale = 100 if cell.percent else 1  # papers print accuracies in percent
    compared: list[float | None] = [None] * 7
    if difference:
        compared = [difference.mean, *difference.t_interval, *difference.bootstrap, difference.p_value, cell.p_holm]
    numbers = [
        len(cell.runs), cell.summary.mean, cell.summary.std, *compared, rank,
        *((figure.value / scale, figure.std and figure.std / scale) if figure else (None, None)),
        *((reached.mean, reached.std) if reached else (None, None)),
    ]  # fmt: skip
    if difference:
        numbers += [difference.std, visible_gain(difference.std, difference.pairs)]
    verdict, words = cell.verdict, [""]
    if verdict is not None and difference:
        numbers += [verdict.claimed, pairs_needed(verdict.claimed, difference.std)]
        words = [verdict.word]
    texts = ["" if number is None or math.isnan(number) else f"{number:.6g}" for number in numbers]
    return [*texts, *[""] * (len(_COLUMNS) - len(texts) - 1), *words]


def as_markdown(text: Sequence[str], blocks: Sequence[Block], notes: Sequence[str]) -> str:
    """Writes a title, sentences, tables and notes as Markdown."""
    parts = [f"# {_markdown(text[0])}", *map(_markdown, text[1:])]
    for block in blocks:
        rule = ["---"] * block.labels + ["---:"] * (len(block.lines[0]) - block.labels)
        head, *rows = ([_markdown(cell) for cell in line] for line in block.lines)
        table = "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))
        parts += [f"## {_markdown(block.title)}", table, *([_markdown(block.note)] if block.note else [])]
    return "\n\n".join([*parts, *map(_markdown, notes)]) + "\n"


def _markdown(text: str) -> str:
    return re.sub(r"([\\|*<])", r"\\\1", one_line(text))


def as_latex(text: Sequence[str], blocks: Sequence[Block], notes: Sequence[str]) -> str:
    r"""Writes each table as an environment ``table`` for a paper that loads ``booktabs``; the sentences as comments."""
    comments = "".join(f"% {one_line(part)}\n" for part in (*text, *notes))
    return comments + "% \\usepackage{booktabs}\n\n" + "\n".join(_latex_table(block) for block in blocks)


def _latex_table(block: Block) -> str:
    head = " & ".join(map(_latex_text, block.lines[0])) + r" \\"
    cells = ([*map(_latex_text, line[: block.labels]), *map(_latex, line[block.labels :])] for line in block.lines[1:])
    rows = [" & ".join(line) + r" \\" for line in cells]
    rows = [re.sub(r"^([\[*])", r"{\1}", row) for row in rows]  # which the break of the line before would take
    columns = "l" * block.labels + "r" * (len(block.lines[0]) - block.labels)
    caption = f"{block.title}. {block.note}".rstrip() if block.note else f"{block.title}."
    lines = [
        r"\begin{table}", r"\centering", rf"\caption{{{_latex_text(caption)}}}", rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule", head, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}", r"\end{table}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in one_line(text))


def _latex(text: str) -> str:
    """Writes a number, whose stars are its significance."""
    escaped = re.sub(r"(?<=\d)(\*{1,3})", r"$^{\1}$", _latex_text(text))
    # A hyphen before a number is its sign.
    return re.sub(r"(?<![\w.-])-(?=\d)", "$-$", escaped)


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


def _panels(table: StudyTable) -> dict[tuple[str, str], dict[int, Method]]:
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
