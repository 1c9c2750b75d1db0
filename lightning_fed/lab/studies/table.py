"""Computes the cells of a study's table: means over seeds, differences to a baseline, ranks, published figures."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from lightning_fed.errors import FederatedError, expect
from lightning_fed.lab.common import expect_known
from lightning_fed.lab.report.runs import Summary, counted, is_share, notes_on_ends, notes_on_window, summarize_found
from lightning_fed.lab.studies import comparison
from lightning_fed.lab.studies.cells import combinations
from lightning_fed.lab.studies.published import Figure, PublishedFigures
from lightning_fed.lab.studies.results import TO_TARGET, StudyResults, StudyRun, is_lost
from lightning_fed.lab.studies.study import Report, Study, reported_axes
from lightning_fed.runs.statistics import first_as_good, goal_of, is_reached, mean_of

__all__ = ["StudyTable", "TableCell", "study_table"]

_OF_REPORT = ("seed", "metric", "statistic")

Key = tuple[str, ...]


@dataclass(frozen=True)
class TableCell:
    """The runs with given values of the axes, one for each seed, with a metric and a statistic."""

    names: dict[str, str]
    runs: tuple[StudyRun, ...]
    values: tuple[float, ...]  # the statistic of each run; NaN where it diverged
    percent: bool  # whether it is an accuracy in [0, 1], which is shown in percent
    to_target: Summary | None = None  # rounds to the target, over seeds
    difference: comparison.PairedDifference | None = None  # to the baseline, over the seeds that both have
    p_holm: float = math.nan  # p-value of the difference, adjusted for all tests of its metric
    published: Figure | None = None
    verdict: comparison.Verdict | None = None  # on the published gain, or the smallest of interest

    @property
    def summary(self) -> Summary:
        """Mean and standard deviation over seeds; if some seeds have no value, the number of those that do."""
        return summarize_found(self.values)

    @property
    def is_cost(self) -> bool:
        """Whether it is not the metric but what the runs spent until it reached a target."""
        return TO_TARGET in self.names["statistic"] and not self.names["statistic"].startswith("at ")

    @property
    def is_lost(self) -> bool:
        """Whether all of its runs have diverged."""
        return all(is_lost(run.curves[self.names["metric"]]) for run in self.runs)


@dataclass(frozen=True)
class StudyTable:
    """The table of a study. The key of a row or column has a value for each of its axes.

    Ranks are by the first metric and statistic: each row's average over the columns that all rows have, or each
    column's average over rows. They are None for fewer than two.
    """

    row_axes: tuple[str, ...]
    column_axes: tuple[str, ...]
    rows: tuple[Key, ...]
    columns: tuple[Key, ...]
    cells: dict[tuple[Key, Key], TableCell]  # row by row; a combination without runs has no cell
    baseline: tuple[str, ...]  # the axes of rows and columns that name the baseline
    ranks: tuple[float, ...] | None
    notes: tuple[str, ...]  # on missing results
    pooled: tuple[TableCell, ...] = ()  # a mean over cells by seed; their values of pooled axes are as `10 pooled`

    @property
    def methods_are_columns(self) -> bool:
        """Whether the compared methods are columns, as all axes of the baseline are."""
        return bool(self.baseline) and {*self.baseline} <= {*self.column_axes}


def study_table(study: Study, results: StudyResults, published: PublishedFigures | None = None) -> StudyTable:
    """Makes the table of a study, in the profile that was run, with the published figures that its report names."""
    _expect_of_study(study, results)
    results, on_equal_loss = comparison.with_equal_loss(study, results)
    row_axes, column_axes = _table_axes(study, results)
    cells = _cells(study, results.runs, row_axes, column_axes)
    if not cells:
        raise FederatedError(
            "Expected `report.statistic` to use evaluated rounds, got "
            f"{', '.join(study.report.statistic)} of runs that end at round {max(run.rounds for run in results.runs)}."
        )
    if published is not None:
        cells = {key: replace(cell, published=_figure(published, cell)) for key, cell in cells.items()}
    cells, pooled = _compared(cells, study, row_axes, column_axes)
    rows = _in_order({row for row, _ in cells}, row_axes, study)
    columns = _in_order({column for _, column in cells}, column_axes, study)
    cells = {key: cells[key] for key in product(rows, columns) if key in cells}
    baseline = tuple(axis for axis in (*row_axes, *column_axes) if axis in study.report.baseline)
    notes = (*_notes(study, results), *on_equal_loss)
    table = StudyTable(row_axes, column_axes, rows, columns, cells, baseline, None, notes, pooled)
    return replace(table, ranks=_ranks(table, study.report))


def _expect_of_study(study: Study, results: StudyResults) -> None:
    for run in results.runs:
        unknown = [name for axis, name in run.axes.items() if name not in study.axes.get(axis, ())]
        if unknown or run.axes.keys() != study.axes.keys():
            raise FederatedError(
                f"Expected the runs of {results.name}, profile {results.profile}, to have the axes of the study file, "
                f"got a run with {run.axes}: report on runs of this file, or give the file that made them."
            )
    measured = {name for run in results.runs for name in run.curves}
    if not measured & {*study.report.metric}:  # a profile may lack some of several metrics, as notes say
        expect_known("report.metric", study.report.metric, sorted(measured), "a column that was measured")


def _table_axes(study: Study, results: StudyResults) -> tuple[Key, Key]:
    """Returns the axes of rows and columns: the named axes, and all others in which cells differ.

    Of the others, metrics and statistics become columns, and the rest rows. Axes of the baseline come last, so that
    methods are below each other.
    """
    report = study.report
    named = {*report.rows, *report.columns}
    several = [axis for axis in study.axes if len({run.axes[axis] for run in results.runs}) > 1]
    measures = [name for name in ("metric", "statistic") if len(getattr(report, name)) > 1]
    rows = [*report.rows, *sorted((axis for axis in several if axis not in named), key=report.baseline.__contains__)]
    columns = (*report.columns, *(name for name in measures if name not in named))
    return tuple(axis for axis in rows if axis not in columns), columns


def _in_order(keys: set[Key], axes: Key, study: Study) -> tuple[Key, ...]:
    known = reported_axes(study)
    return tuple(sorted(keys, key=lambda key: [known[axis].index(name) for axis, name in zip(axes, key, strict=True)]))


def _key(names: Mapping[str, str], row_axes: Key, column_axes: Key) -> tuple[Key, Key]:
    return tuple(names[axis] for axis in row_axes), tuple(names[axis] for axis in column_axes)


def _cells(study: Study, runs: Sequence[StudyRun], row_axes: Key, column_axes: Key) -> dict[tuple[Key, Key], TableCell]:
    groups: dict[tuple[Key, Key], tuple[dict[str, str], list[StudyRun]]] = {}
    for run in runs:
        for metric in study.report.metric:
            curve = run.curves.get(metric, {})
            for statistic in (name for name in study.report.statistic if is_reached(curve, name)):
                names = {**run.axes, "metric": metric, "statistic": statistic}
                names |= {"seed": str(run.seed)} if "seed" in (*row_axes, *column_axes) else {}
                groups.setdefault(_key(names, row_axes, column_axes), (names, []))[1].append(run)
    shares = {
        str(metric): is_share(metric, [value for run in runs for value in run.curves.get(metric, {}).values()])
        for metric in study.report.metric
    }
    first, target = study.report.metric[0], study.report.target
    if target is not None:
        expect(
            target <= 1 or not shares[first],
            f"Expected `report.target` in [0, 1], as {first} is measured, got {target:g}: write {target / 100:g} for "
            f"{target:g} %.",
        )
    return {key: _cell(names, cell, shares[names["metric"]], study.report) for key, (names, cell) in groups.items()}


def _cell(names: dict[str, str], runs: Sequence[StudyRun], percent: bool, report: Report) -> TableCell:
    metric, curves = names["metric"], [run.curves[names["metric"]] for run in runs]
    goal, target = report.goal_in(metric), report.target if metric == report.metric[0] else None
    if target is not None or names["statistic"] == "best":
        goal = goal_of(metric, goal, "report.goal")
    values = tuple(comparison.value_of(run, names["statistic"], metric, goal) for run in runs)
    reached = None
    if target is not None:
        rounds = [None if is_lost(curve) else first_as_good(curve, metric, target, goal) for curve in curves]
        reached = summarize_found([math.nan if at is None else at for at in rounds])
    cell = TableCell(names, tuple(runs), values, percent, reached)
    return replace(cell, percent=False) if cell.is_cost else cell


def _compared(
    cells: dict[tuple[Key, Key], TableCell], study: Study, row_axes: Key, column_axes: Key
) -> tuple[dict[tuple[Key, Key], TableCell], tuple[TableCell, ...]]:
    """Compares each cell with its baseline cell, p-values adjusted within a metric, and returns pooled rows beside."""
    pairs = dict[tuple[Key, Key], tuple[Key, Key]]()
    for key, cell in cells.items():
        metric = study.report.against.get(cell.names["metric"], cell.names["metric"])
        other = _key({**cell.names, **study.report.baseline, "metric": metric}, row_axes, column_axes)
        if other != key and other in cells and not cell.is_cost:
            pairs[key] = other
    found = {key: _difference(cells[key], cells[other]) for key, other in pairs.items()}
    values = {key: (cells[key].names["metric"], cells[key].values, cells[other].values) for key, other in pairs.items()}
    # Equal cells are not a test, and a pair of cells that occurs twice is one test; each metric is a family.
    tests = {values[key]: one.p_value for key, one in found.items() if one.std > 0 or one.p_value < 1}
    adjusted = dict[object, float]()
    for metric in study.report.metric:
        family = {pair: p for pair, p in tests.items() if pair[0] == metric}
        adjusted |= zip(family, comparison.holm_adjusted([*family.values()]).tolist(), strict=True)
    judged = {
        key: replace(
            cells[key],
            difference=one,
            p_holm=adjusted.get(values[key], math.nan),
            verdict=_verdict(cells[key], cells[pairs[key]], one, study),
        )
        for key, one in found.items()
    }
    return cells | judged, _pooled([(cell, cells[pairs[key]]) for key, cell in judged.items()], study.report)


def _verdict(
    cell: TableCell, baseline: TableCell, difference: comparison.PairedDifference, study: Study
) -> comparison.Verdict | None:
    """Judges the published gain, or else the smallest gain of interest."""
    report, metric, mean, unit = study.report, cell.names["metric"], baseline.summary.mean, 100 if cell.percent else 1
    claimed, failed = report.gain_in(metric), None
    if cell.published is not None and baseline.published is not None:
        published = baseline.published.value / unit
        claimed, scale = cell.published.value / unit - published, 1.0 if cell.percent else abs(mean)
        sides = [[run.curves[one.names["metric"]] for run in one.runs] for one in (cell, baseline)]
        failed = [] if comparison.is_level(mean - published, claimed, scale, sides) else ["baseline"]
        failed += ["rates"] if seeds_of_rates(study, (*cell.runs, *baseline.runs)) else []
    learned = True
    if metric == report.metric[0] and report.learned is not None:
        less = goal_of(metric, report.goal_in(metric), "report.goal") == "min"
        learned = (min if less else max)(mean, report.learned) == mean
    return comparison.verdict_on(difference, claimed, _better(report, metric, claimed, failed), learned, failed)


def _better(report: Report, metric: str, claimed: float, failed: Sequence[str] | None) -> int:
    """Returns 1 if more is better, else -1: a gain of interest says it by its sign, a paper may publish a loss."""
    goal = report.goal_in(metric) if failed is not None else None
    return -1 if goal == "min" or (goal is None and claimed < 0) else 1


def seeds_of_rates(study: Study, runs: Iterable[StudyRun]) -> list[int]:
    """Returns the seeds of runs that have also chosen their tuned options."""
    return sorted({run.seed for run in runs if run.chosen and run.seed in study.tune.seeds})


def _pooled(pairs: Iterable[tuple[TableCell, TableCell]], report: Report) -> tuple[TableCell, ...]:
    """Pools the judged cells that differ in the axes of ``report.pool`` alone, each with its baseline.

    The mean over cells of a seed's values is one value, so that seeds stay the only sample. Its claimed gain is the
    mean of theirs, and it passes the gates that all of them pass.
    """
    groups: dict[Key, list[tuple[TableCell, TableCell]]] = {}
    for cell, baseline in pairs if report.pool else ():
        if cell.verdict and cell.verdict.word != "nothing learned":
            key = tuple(name for axis, name in cell.names.items() if axis not in report.pool)
            groups.setdefault((*key, str(cell.verdict.failed is None)), []).append((cell, baseline))
    found = []
    for members in (group for group in groups.values() if len(group) > 1):
        first, verdicts = members[0][0], [cell.verdict for cell, _ in members if cell.verdict]
        seeds = sorted(set.intersection(*({run.seed for run in one.runs} for pair in members for one in pair)))
        sides = [[_by_seed(pair[side]) for pair in members] for side in (0, 1)]
        ours, theirs = (tuple(mean_of([cell[seed] for cell in side]) for seed in seeds) for side in sides)
        failed = None if verdicts[0].failed is None else sorted({gate for one in verdicts for gate in one.failed or ()})
        claimed, difference = mean_of([one.claimed for one in verdicts]), comparison.paired_difference(ours, theirs)
        better = _better(report, first.names["metric"], claimed, failed)
        names = first.names | dict.fromkeys(report.pool, f"{len(members)} pooled")
        verdict = comparison.verdict_on(difference, claimed, better, True, failed)
        found.append(TableCell(names, (), ours, first.percent, difference=difference, verdict=verdict))
    return tuple(found)


def _by_seed(cell: TableCell) -> dict[int, float]:
    return {run.seed: value for run, value in zip(cell.runs, cell.values, strict=True)}


def _difference(cell: TableCell, baseline: TableCell) -> comparison.PairedDifference:
    ours, theirs = _by_seed(cell), _by_seed(baseline)
    shared = [seed for seed in ours if seed in theirs]
    return comparison.paired_difference([ours[seed] for seed in shared], [theirs[seed] for seed in shared])


def _figure(published: PublishedFigures, cell: TableCell) -> Figure | None:
    if missing := [axis for axis in published.axes if axis not in cell.names]:
        raise FederatedError(f"Expected `report.rows` or `report.columns` to have {missing[0]!r}, as `published` has.")
    return published.figure(cell.names)


def _ranks(table: StudyTable, report: Report) -> tuple[float, ...] | None:
    methods, others, cells = table.rows, table.columns, table.cells
    method_axes, other_axes = {*table.row_axes}, {*table.column_axes}
    if table.methods_are_columns:
        methods, others, method_axes, other_axes = others, methods, other_axes, method_axes
        cells = {(column, row): cell for (row, column), cell in cells.items()}
    whole = [other for other in others if all((method, other) in cells for method in methods)]
    measures = [tuple(cells[methods[0], other].names[name] for name in ("metric", "statistic")) for other in whole]
    whole = [other for other, measure in zip(whole, measures, strict=True) if measure == measures[0]]
    # Ranking metrics or seeds against each other is meaningless; of several in one setting only the first counts.
    if len(whole) < 2 or len(methods) < 2 or method_axes & {*_OF_REPORT} or other_axes <= {*_OF_REPORT}:
        return None
    means = np.array([[np.mean(cells[method, other].values) for other in whole] for method in methods])
    goal = report.goal_in(measures[0][0])
    return tuple(comparison.average_ranks(means, goal == "min").tolist()) if goal else None


def _notes(study: Study, results: StudyResults) -> list[str]:
    notes = []
    expected = len(list(combinations(study))) * len(study.seeds)
    if len(results.runs) < expected:
        notes.append(f"Results exist for {len(results.runs):,} of {counted(expected, 'run')}.")
    counted_in = (*study.report.metric, *comparison.equal_losses(study.report))
    lost = [run for run in results.runs if any(is_lost(run.curves.get(name, {})) for name in counted_in)]
    if lost:
        notes.append(
            f"{len(lost):,} of {counted(len(results.runs), 'run')} diverged. A mean over the remaining seeds gives "
            "their number: it flatters its method, and is not compared."
        )
    if seeds := [str(seed) for seed in seeds_of_rates(study, results.runs)]:
        notes.append(f"Tuned on seeds of the table ({', '.join(seeds)}), which flatters: list others in `tune.seeds`.")
    notes += notes_on_ends(run.rounds for run in results.runs if run not in lost)
    measured = [metric for metric in study.report.metric if any(metric in run.curves for run in results.runs)]
    if absent := [f"`{metric}`" for metric in study.report.metric if metric not in measured]:
        notes.append(f"No run has measured {', '.join(absent)}.")
    for statistic in study.report.statistic:
        curves = [run.curves.get(metric, {}) for metric in measured for run in results.runs]
        reached = [curve for curve in curves if is_reached(curve, statistic)]
        if len(reached) < len(curves):
            notes.append(f"{len(reached):,} of {counted(len(curves), 'curve')} reach `{statistic}`.")
        notes += notes_on_window(reached, statistic)
    return notes
