"""Converts a study's table and tuning to tables of text: means, differences, published figures, all numbers."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from lightning_fed.lab.common import column_head, csv_text
from lightning_fed.lab.report.page import coded
from lightning_fed.lab.report.plots import KINDS, picture, tuning_html
from lightning_fed.lab.report.runs import counted, is_share, over_seeds, summarize
from lightning_fed.lab.studies import formats
from lightning_fed.lab.studies.cells import at_edge, edges_of
from lightning_fed.lab.studies.comparison import chance, pairs_needed, visible_gain
from lightning_fed.lab.studies.formats import Block, without_constants
from lightning_fed.lab.studies.page import panels_of, study_page
from lightning_fed.lab.studies.results import BESIDE, StudyResults, Trial
from lightning_fed.lab.studies.study import Study, tuned_per
from lightning_fed.lab.studies.table import StudyTable, TableCell
from lightning_fed.runs.statistics import Goal, known_goal

__all__ = ["drawn", "heading", "study_blocks", "table_lines", "tuned_block", "tuning_charts"]

_LEVELS = (0.001, 0.01, 0.05)
_MEASURES = ("metric", "statistic")


def heading(study: Study, results: StudyResults) -> list[str]:
    """Returns the title, then paragraphs of Markdown on the source of the study and what was run."""
    profile = study.profiles.get(results.profile)
    size = f"Profile `{results.profile}`" + (f": {profile.why}." if profile and profile.why else ".")
    source = [f"Source: {study.source}."] if study.source else []
    opened = ["Left open by the source:", *(f"- {one}" for one in study.open)] if study.open else []
    return [study.title, *source, *([size] if results.profile and study.profiles else []), *opened]


def study_blocks(
    study: Study, results: StudyResults, table: StudyTable, published: str = "", best: bool = False
) -> list[Block]:
    """Makes the tables of a study; ``published`` is the source of published figures, ``best`` marks the best means."""
    blocks = [_main(study, table, best)]
    if any(cell.difference and not math.isnan(cell.difference.mean) for cell in table.cells.values()):
        blocks.append(_differences(study, table))
    if any(cell.published for cell in table.cells.values()):
        blocks.append(_matrix(table, f"{published}, and in brackets our mean minus it", _published, "published"))
    if any(cell.to_target for cell in table.cells.values()):
        title = f"Rounds until {study.report.metric[0]} is as good as {study.report.target:g}, mean ± std over seeds"
        blocks.append(_matrix(table, title, _rounds, "target"))
    if results.trials:
        blocks.append(tuned_block(study, results.trials))
    return blocks


def drawn(
    kind: str, study: Study, results: StudyResults, table: StudyTable, blocks: Sequence[Block],
    width: float | None = None,
) -> bytes:  # fmt: skip
    """Writes a study in one format: ``md``, ``csv``, ``tex``, ``html``, or as a picture of a ``width`` in inches."""
    text, x = heading(study, results), study.report.x
    if kind in KINDS:
        return picture(panels_of(table), x, kind, width)
    if kind == "html":
        return study_page(text, blocks, table, x, tuning_charts(study, results.trials)).encode()
    if kind == "csv":
        return csv_text(table_lines(study, table), end="\n").encode()
    if kind == "tex":
        return formats.as_latex(text, blocks, table.notes, study.name or "runs").encode()
    return formats.as_markdown(text, blocks, table.notes).encode()


def _main(study: Study, table: StudyTable, best: bool) -> Block:
    cells = table.cells.values()
    measures = [{_named(cell, measure) for cell in cells if not cell.is_cost} for measure in _MEASURES]
    counts = over_seeds(len(cell.runs) for cell in cells)
    over = "one run each" if counts == "one seed" and "seed" in (*table.row_axes, *table.column_axes) else counts
    (metric, *metrics), (statistic, *statistics) = map(sorted, measures)
    what = [metric] * (not metrics) + [_said_of(statistic)] * (not statistics)
    title = ", ".join([*([" ".join(what)] if what else []), over])
    notes = []
    if any(_stars(cell.p_holm) for cell in cells):
        notes.append(f"*, **, ***: p < 0.05, 0.01, 0.001 against {_baseline(study)} (paired t-test, Holm).")
    if edge := at_edge(study, [(cell.names, cell.runs[0].chosen) for cell in cells]):
        notes.append(f"Tuned to an edge of its grid: {edge}.")
    if best:
        notes.append("Bold: the best mean in each comparison; underlined: the second best of three or more.")
    if metrics:  # then it does not begin with the name of a metric
        title = title[:1].upper() + title[1:]
    block = _matrix(table, title, _value, note=" ".join(notes))
    block = replace(block, marks=_marks(study, table, block.labels) if best else {})
    ranks = [f"{rank:.2f}" for rank in table.ranks or ()]
    if ranks and table.methods_are_columns:
        block.lines.append(["average rank", *[""] * (block.labels - 1), *ranks])
    elif ranks:
        for line, cell in zip(block.lines, ["average rank", *ranks], strict=True):
            line.append(cell)
        block = replace(block, heads=(*block.heads, (*[""] * (len(block.heads[0]) - 1), "average rank")))
    return block


def _said_of(statistic: str) -> str:
    """Says a statistic in words that follow the name of a metric."""
    known = {"best": "at each run's best round", "final": "at the last round"}
    said = re.sub(r"^last (\d+)$", r"over the last \1 rounds", known.get(statistic, statistic))
    said = re.sub(r"^(last \d+ %)$", r"over the \1 of the rounds", said)
    return re.sub(r"^rounds (\d+)-", r"over rounds \1 to ", said)


def _marks(study: Study, table: StudyTable, labels: int) -> dict[tuple[int, int], int]:
    """Returns by line and column a 1 for the best mean in a setting and a 2 for the second of three or more."""
    methods = {*table.column_axes} if table.methods_are_columns else {*table.baseline} or {*table.row_axes}
    settings: dict[tuple[str, ...], dict[tuple[int, int], float]] = {}
    for (row, column), cell in table.cells.items():
        setting = tuple(n for axis, n in cell.names.items() if axis not in methods or axis in (*_MEASURES, "seed"))
        place = 1 + table.rows.index(row), labels + table.columns.index(column)
        if (goal := study.report.goal_in(cell.names["metric"])) and not cell.is_cost:
            settings.setdefault(setting, {})[place] = (-1 if goal == "min" else 1) * cell.summary.mean
    marks: dict[tuple[int, int], int] = {}
    for means in settings.values():
        ranked = sorted({mean for mean in means.values() if not math.isnan(mean)}, reverse=True)
        marked = ranked[: min(2, len(means) - 1)]
        marks |= {place: 1 + marked.index(mean) for place, mean in means.items() if mean in marked}
    return marks


def _baseline(study: Study) -> str:
    return ", ".join(f"{axis} {value}" for axis, value in study.report.baseline.items())


def _differences(study: Study, table: StudyTable) -> Block:
    axes, cells = (*table.row_axes, *table.column_axes), [*table.cells.values(), *table.pooled]
    papers = any(cell.verdict and cell.verdict.failed is not None for cell in cells)
    names = ["difference", "95 % interval (t)", "95 % interval (bootstrap)", "p (Holm)", "seeds", "seen at 80 % power"]
    names += ["claimed", "power", "seeds to see it", *["here"] * papers, "verdict"]
    lines, lost = [[*axes, *names]], 0
    for cell in cells:
        if (found := cell.difference) is None:
            continue
        if math.isnan(found.mean):
            lost += 1
            continue
        intervals = [
            "" if math.isnan(low) else f"[{_signed(low, cell.percent)}, {_signed(high, cell.percent)}]"
            for low, high in (found.t_interval, found.bootstrap)
        ]
        p_value = "" if math.isnan(cell.p_holm) else f"{cell.p_holm:.3f}" if cell.p_holm >= 0.001 else "< 0.001"
        seen = _signed(visible_gain(found.std, found.pairs), cell.percent).lstrip("+")
        line = [cell.names[axis] for axis in axes]
        line += [_signed(found.mean, cell.percent), *intervals, p_value, str(found.pairs), seen]
        judged = [""] * (len(names) - 6)
        if verdict := cell.verdict:
            needed, able = pairs_needed(verdict.claimed, found.std), chance(verdict.claimed, found)
            judged = [_signed(verdict.claimed, cell.percent), "" if math.isnan(able) else f"{able:.2f}"]
            judged += [f"{needed:,}" if needed else "", *[verdict.here] * papers, verdict.word]
        lines.append(line + judged)
    note = "Differences are paired by seed; p is of a paired t-test, adjusted for all tests of a metric (Holm)."
    note += " A pooled row has of each seed the mean over its cells; Holm leaves it out." * bool(table.pooled)
    for metric, other in study.report.against.items():
        note += f" {metric} is compared with {other}."
    if lost:
        note += f" {counted(lost, 'comparison')} with runs that diverged {'is' if lost == 1 else 'are'} left out."
    shown = {cell.percent for cell in table.cells.values()}
    unit = ", percentage points" + (" where in %" if False in shown else "") if True in shown else ""
    title = f"Difference to {_baseline(study)}{unit}"
    return without_constants(Block(title, lines, len(lines[0]) - len(names), note, name="differences"))


def _matrix(table: StudyTable, title: str, text: Callable[[TableCell], str], name: str = "", note: str = "") -> Block:
    """Arranges the cells that have a text; values that all rows or all columns share are above the table."""
    texts = {key: shown for key, cell in table.cells.items() if (shown := text(cell))}
    of_row, of_column = ({key[side]: table.cells[key] for key in texts} for side in (0, 1))
    rows, columns = [key for key in table.rows if key in of_row], [key for key in table.columns if key in of_column]
    row_axes, column_axes = _varying(table.row_axes, rows) or table.row_axes[-1:], _varying(table.column_axes, columns)
    cell = of_row[rows[0]]
    told = (*row_axes, *column_axes, *_MEASURES)
    shared = [f"{axis} = {cell.names[axis]}" for axis in (*table.row_axes, *table.column_axes) if axis not in told]
    only = next((_named(cell, axis) for axis in _MEASURES if axis not in row_axes), "mean")
    heads = tuple(
        tuple(column_head([axis], [_named(of_column[column], axis)]) for axis in column_axes) or (only,)
        for column in columns
    )
    lines = [[*row_axes, *map(", ".join, heads)]]
    for row in rows:
        labels = (_named(of_row[row], axis) for axis in row_axes)
        lines.append([*labels, *(texts.get((row, column), "–") for column in columns)])
    above = f"The same in all cells: {'; '.join(shared)}." if shared else ""
    return Block(title, lines, len(row_axes), note, above, name, heads)


def _varying(axes: tuple[str, ...], keys: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(axis for axis, names in zip(axes, zip(*keys, strict=True), strict=True) if len({*names}) > 1)


def _named(cell: TableCell, axis: str) -> str:
    """Returns the cell's value of an axis for a table, with the unit for a metric."""
    return cell.names[axis] + " (%)" * (axis == "metric" and cell.percent)


def _value(cell: TableCell) -> str:
    """Writes the mean over the seeds that have a value, and their number if not all have one; of costs no such mean."""
    left, most = [value for value in cell.values if not math.isnan(value)], len(cell.values)
    if cell.is_lost:
        return "diverged"
    if cell.is_cost or not left:
        return cell.summary.text(most, cell.percent)
    count = "" if len(left) == most else f" ({len(left)} of {most} seeds)"
    return summarize(left).text(len(left), cell.percent) + count + _stars(cell.p_holm)


def _published(cell: TableCell) -> str:
    if (figure := cell.published) is None:
        return ""
    theirs = f"{figure.value:.2f}" + ("" if figure.std is None else f" ± {figure.std:.2f}")
    ours = (100 if cell.percent else 1) * cell.summary.mean
    return theirs if math.isnan(ours) else f"{theirs} [{ours - figure.value:+.2f}]"


def _rounds(cell: TableCell) -> str:
    return cell.to_target.text(len(cell.runs), False) if cell.to_target else ""


def _stars(p_value: float) -> str:
    return "*" * sum(p_value < level for level in _LEVELS)


def _signed(value: float, percent: bool) -> str:
    if math.isnan(value):
        return ""
    return f"{100 * value:+.2f}" if percent else f"{value:+.3g}"


def table_lines(study: Study, table: StudyTable) -> list[list[str]]:
    """Returns the table with a line for each cell and unscaled numbers: accuracies are in [0, 1]."""
    axes = list(dict.fromkeys([*table.row_axes, *table.column_axes, "metric", "statistic"]))
    lines = [[*axes, *_COLUMNS]]
    methods = table.columns if table.methods_are_columns else table.rows
    ranks = dict(zip(methods, table.ranks or [None] * len(methods), strict=True))
    for (row, column), cell in table.cells.items():
        rank = ranks[column if table.methods_are_columns else row]
        edges = edges_of(study, cell.names, cell.runs[0].chosen)
        told = "; ".join(f"{option} {side}" for option, side in edges.items())
        lines.append([*(cell.names[axis] for axis in axes), *_numbers(cell, rank), told])
    return lines + [[*(cell.names[axis] for axis in axes), *_numbers(cell, None), ""] for cell in table.pooled]


_COLUMNS = (
    "seeds", "mean", "std", "difference", "t_low", "t_high", "bootstrap_low", "bootstrap_high", "p", "p_holm",
    "average_rank", "published", "published_std", "rounds_to_target", "rounds_to_target_std", "std_difference",
    "visible_gain", "claimed", "power", "seeds_needed", "here", "verdict", "at_edge",
)  # fmt: skip


def _numbers(cell: TableCell, rank: float | None) -> list[str]:
    difference, figure, reached = cell.difference, cell.published, cell.to_target
    scale = 100 if cell.percent else 1  # papers print accuracies in percent
    compared: list[float | None] = [None] * 7
    judged: list[float | None] = [None] * 5
    if difference:
        compared = [difference.mean, *difference.t_interval, *difference.bootstrap, difference.p_value, cell.p_holm]
        judged[:2] = difference.std, visible_gain(difference.std, difference.pairs)
    if difference and cell.verdict:
        claimed = cell.verdict.claimed
        judged[2:] = claimed, chance(claimed, difference), pairs_needed(claimed, difference.std)
    numbers = [
        len(cell.values), cell.summary.mean, cell.summary.std, *compared, rank,
        *((figure.value / scale, figure.std and figure.std / scale) if figure else (None, None)),
        *((reached.mean, reached.std) if reached else (None, None)), *judged,
    ]  # fmt: skip
    texts = ["" if number is None or math.isnan(number) else f"{number:.6g}" for number in numbers]
    return [*texts, *((cell.verdict.here, cell.verdict.word) if cell.verdict else ("", ""))]


def tuned_block(study: Study, trials: Sequence[Trial]) -> Block:
    """Returns the options chosen by the deciding metric, and those that each other metric would have chosen."""
    axes, (first, *others) = tuned_per(study), _names(trials)
    shown = [name.removesuffix(BESIDE) for name in others]
    lines = [[*axes, "chosen", first, *(word for name in shown for word in (f"best for {name}", name))]]
    for key, attempts in _groups(axes, trials).items():
        chosen, value = _best(first, attempts, _goal(study, first))
        options = attempts[chosen][0].options if chosen else {}
        at = edges_of(study, dict(zip(axes, key, strict=True)), options)
        marked = (f"{option} {it}" + (f" ({at[option]})" if option in at else "") for option, it in options.items())
        beside = (_best(name, attempts, _goal(study, name)) for name in others)
        lines.append([*key, ", ".join(marked), value, *(word for pair in beside for word in pair)])
    seeds = len(study.tune.seeds)
    over = "one seed" if seeds == 1 else f"mean over {counted(seeds, 'seed')}"
    note = f"The runs use the chosen values, the best by {first}, {over}; (smallest), (largest): at an edge."
    note += " The other columns show what other metrics would have chosen; they decide nothing." * bool(others)
    return without_constants(Block("Tuned options", lines, len(axes), note, name="tuned"))


def tuning_charts(study: Study, trials: Sequence[Trial]) -> list[str]:
    """Draws for each choice the deciding metric over the option with the most values, and marks the chosen trial."""
    axes, charts, names = tuned_per(study), [], _names(trials)
    for index, (key, attempts) in enumerate(_groups(axes, trials).items()):
        means, chosen = _means(names[0], attempts), _best(names[0], attempts, _goal(study, names[0]))[0]
        if not chosen:
            continue
        options = {text: attempts[text][0].options for text in means}
        pairs = {pair for one in options.values() for pair in one.items()}
        option = max(options[chosen], key=lambda name: sum(name == other for other, _ in pairs))
        lines: dict[str, list[tuple[str, float]]] = {}
        for text, mean in means.items():
            others = ", ".join(f"{name} {value}" for name, value in options[text].items() if name != option)
            lines.setdefault(others or names[0], []).append((options[text].get(option, ""), mean))
        drawn = tuning_html(lines, [(options[chosen][option], means[chosen])], option, names[0], f"tuning-{index}")
        charts.append(f"<div><h3>{coded(column_head(axes, key))}</h3>{drawn}</div>")
    return charts


def _names(trials: Sequence[Trial]) -> list[str]:
    return list(dict.fromkeys(name for trial in trials for name in trial.values))


def _groups(axes: Sequence[str], trials: Sequence[Trial]) -> dict[tuple[str, ...], dict[str, list[Trial]]]:
    """Groups the trials of the last stage, which decides, by choice and then by their options as text."""
    groups: dict[tuple[str, ...], dict[str, list[Trial]]] = {}
    keys = [tuple(trial.axes.get(axis, "") for axis in axes) for trial in trials]
    last = dict(sorted(zip(keys, (trial.stage for trial in trials), strict=True)))
    for key, trial in zip(keys, trials, strict=True):
        if trial.stage == last[key]:
            options = ", ".join(f"{option} {value}" for option, value in trial.options.items())
            groups.setdefault(key, {}).setdefault(options, []).append(trial)
    return groups


def _means(name: str, attempts: Mapping[str, Sequence[Trial]]) -> dict[str, float]:
    """Returns the mean of a value for each set of options, but only for those with the full number of runs."""
    most = max(map(len, attempts.values()))
    return {
        options: fmean([trial.values[name] for trial in trials])
        for options, trials in attempts.items()
        if len(trials) == most and all(math.isfinite(trial.values.get(name, math.nan)) for trial in trials)
    }


def _goal(study: Study, name: str) -> Goal | None:
    """Returns the goal of a value of trials: of the deciding metric, or of one that is shown beside it."""
    if name == f"{study.tune.metric} {study.tune.statistic}":
        return known_goal(study.tune.metric, study.tune.goal)
    return study.report.goal_in(name.removesuffix(BESIDE))


def _best(name: str, attempts: Mapping[str, Sequence[Trial]], goal: Goal | None) -> tuple[str, str]:
    """Returns the options with the best mean over all their runs, the first of equal ones, and this mean."""
    if not (values := _means(name, attempts)) or goal is None:
        return "", ""
    choice = (min if goal == "min" else max)(values, key=values.__getitem__)
    return choice, f"{100 * values[choice]:.2f} %" if is_share(name, [values[choice]]) else f"{values[choice]:.4g}"
