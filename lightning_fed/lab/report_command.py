"""The command ``lightning-fed report RUNS... [--metric NAME] [--format html]``, or with ``--study FILE`` of a study."""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from lightning_fed.core.files import write_atomically
from lightning_fed.errors import FederatedError, expect, expect_choice, expect_number
from lightning_fed.lab.common import CommandParser, csv_text
from lightning_fed.lab.report.plots import KINDS
from lightning_fed.lab.report.runs import (
    PREFERRED,
    TO_REACH,
    MeasuredRun,
    Method,
    group_runs,
    is_measured,
    is_share,
    load_runs,
    spent,
)
from lightning_fed.lab.studies.blocks import drawn, study_blocks
from lightning_fed.lab.studies.formats import as_text
from lightning_fed.lab.studies.results import TO_TARGET, StudyResults, StudyRun, is_lost
from lightning_fed.lab.studies.study import AxisValue, Name, Report, Study
from lightning_fed.lab.studies.table import StudyTable, study_table
from lightning_fed.runs.statistics import LAST, Goal, first_as_good, goal_of, known_goal, mean_of, run_statistic

__all__ = ["as_study", "at_budget", "choose_metric", "derived_columns", "main", "make_parser", "to_target"]

_METHOD = "method"
_OF_STUDIES = {"profile": "--profile", "source": "--from"}
_OF_RUNS = {name: f"--{name}" for name in ("metric", "x", "budget", "target", "goal", "baseline")}


def main(argv: list[str]) -> int:
    """Makes the report on run folders, or with ``--study`` that on a study; returns 0."""
    options = make_parser().parse_args(argv)
    others, word = (_OF_RUNS, "without") if options.study else (_OF_STUDIES, "with")
    for name, option in others.items():
        expect(getattr(options, name) is None, f"Expected `{option}` only {word} `--study`.")
    expect_number("--width", options.width, least=1, most=50, optional=True)
    sized = options.width is None or options.format in (None, *KINDS)
    expect(sized, f"Expected `--width` with a picture ({', '.join(KINDS)}), got `--format {options.format}`.")
    if options.study:
        from lightning_fed.lab.runner.report import report_study

        report_study(options)
    else:
        _report_runs(options)
    return 0


def _report_runs(options: argparse.Namespace) -> None:
    """Prints the table over methods and seeds, and writes it as CSV and in the chosen format."""
    expect(options.runs, "Expected `lightning-fed report` with folders of runs, or with `--study FILE`, got none.")
    options.x = options.x or "round"
    runs, notes = load_runs(options.runs)
    metric = options.metric or choose_metric(runs)
    methods, more_notes = group_runs(runs, metric)
    said = {run.goals[metric] for run in runs if metric in run.goals}
    goal = known_goal(metric, options.goal or (said.pop() if len(said) == 1 else None))
    derived = derived_columns(methods, metric, options.x, options.budget, options.target, goal)
    study, results = as_study(methods, metric, goal, derived, options.x, options.baseline)
    table = study_table(study, results)
    notes += [*more_notes, *table.notes]
    counts = {method.label: len(method.runs) for method in methods}
    if len({*counts.values()}) > 1:
        notes.append(f"Seeds: {', '.join(f'{label} {count}' for label, count in counts.items())}.")
    if goal is None:
        notes.append(f"The best of {metric} is not known by its name: say it by `--goal min` or `--goal max`.")
    table, tables = replace(table, notes=tuple(notes)), study_blocks(study, results, table, best=options.best)
    kind = options.format or "png"
    content = drawn(kind, study, results, table, tables, options.width)
    written = _write(options, {kind: content, "csv": csv_text(_lines(table)).encode()})
    print(as_text(tables, [*notes, f"written: {', '.join(map(str, written))}"]))


def choose_metric(runs: Sequence[MeasuredRun]) -> str:
    """Returns the first of test and validation accuracy, then losses, that all runs measured; one is required."""
    for metric in PREFERRED:
        if all(metric in run.columns for run in runs):
            return metric
    columns = ", ".join(sorted({column for run in runs for column in run.columns}))
    raise FederatedError(f"Expected a metric that every run measured, got none: choose `--metric` of {columns}.")


def as_study(
    methods: Sequence[Method], metric: str, goal: Goal | None, derived: Mapping[str, Callable[[MeasuredRun], float]],
    x: str = "round", baseline: str | None = None,
) -> tuple[Study, StudyResults]:  # fmt: skip
    """Returns runs as a study of one axis, the method; the best final mean comes first, methods with NaN last.

    If nobody knows the goal, methods keep their order. Each function in ``derived`` adds a statistic; it maps a run to
    a value, or to NaN if there is none.
    """
    if goal is not None:

        def place(method: Method) -> tuple[bool, float]:
            end = mean_of([run_statistic(run.columns[metric], "final", metric) for run in method.runs])
            return math.isnan(end), end if goal == "min" else -end

        methods = sorted(methods, key=place)
    if baseline is not None:
        expect_choice("--baseline", baseline, [method.label for method in methods])
    runs = [
        StudyRun(
            {_METHOD: method.label}, run.seed, run.fingerprint, max(run.columns[metric]), curves=run.columns,
            read={(metric, name): value(run) for name, value in derived.items()}, folder=run,
        )
        for method in methods
        for run in method.runs
    ]  # fmt: skip
    report = Report(
        metric=[Name(metric)], goal=goal, rows=[_METHOD], columns=["statistic"], x=x,
        statistic=[Name("final"), *([Name("best")] if goal else []), Name(f"last {LAST}"), *map(Name, derived)],
        baseline={} if baseline is None else {_METHOD: Name(baseline)},
    )  # fmt: skip
    axes: dict[str, dict[str, AxisValue]] = {_METHOD: {method.label: AxisValue() for method in methods}}
    return Study(metric, axes=axes, seeds=[], report=report), StudyResults("", "", tuple(runs))


def at_budget(run: MeasuredRun, metric: str, x: str, budget: float) -> float:
    """Returns the metric at the last evaluation within a budget; NaN if no evaluation is, or if the run diverged."""
    curve = run.columns[metric]
    costs = spent(run, x, list(curve))
    within = [value for value, cost in zip(curve.values(), costs, strict=True) if cost <= budget]
    return within[-1] if within and not is_lost(curve) else math.nan


def to_target(run: MeasuredRun, metric: str, x: str, target: float, goal: Goal | None = None) -> float:
    """Returns the cost up to the first evaluation that reaches the target; NaN if none does, or if the run diverged."""
    curve = run.columns[metric]
    reached = None if is_lost(curve) else first_as_good(curve, metric, target, goal)
    return math.nan if reached is None else spent(run, x, [reached])[0]


def derived_columns(
    methods: Sequence[Method], metric: str, x: str, budget: float | None, target: float | None, goal: Goal | None = None
) -> dict[str, Callable[[MeasuredRun], float]]:
    """Returns by name the columns that a budget, in units of x, and a target of the metric add to the table.

    Each is computed for one run; those whose names begin with ``at`` are in the metric's unit.
    """
    columns: dict[str, Callable[[MeasuredRun], float]] = {}
    if budget is not None:
        expect_number("--budget", budget, least=0)
        columns[f"at {x} {budget:g}"] = partial(at_budget, metric=metric, x=x, budget=budget)
    if target is not None:
        values = [value for method in methods for run in method.runs for value in run.columns[metric].values()]
        low, high = (0, 1) if is_share(metric, values) else (-math.inf, math.inf)
        expect_number("--target", target, least=low, most=high)
        costs = [x, *(cost for cost in TO_REACH if cost != x and is_measured(methods, cost))]
        reach = partial(to_target, metric=metric, target=target, goal=goal_of(metric, goal, "--goal"))
        columns |= {f"{cost}{TO_TARGET}{target:g}": partial(reach, x=cost) for cost in costs}
    return columns


def make_parser() -> CommandParser:
    """Makes the parser of this command."""
    parser = CommandParser(
        prog="lightning-fed report",
        description="Makes a table and a picture of a metric over methods and seeds from run folders. Runs that differ "
        "only in their seed are one method; the newest run of each seed counts. With --study it makes the tables and "
        "curves of a study: results.csv, curves.csv, table.md, table.csv, table.tex and curves.png.",
    )  # fmt: skip
    add = parser.add_argument
    add("runs", nargs="*", type=Path, metavar="RUNS",
        help="folder of a run, or a folder above runs; of a study the `--output` of `lightning-fed study` (default: "
        "runs/studies)")  # fmt: skip
    add("--format", choices=(*KINDS, "html", "md", "tex", "csv"),
        help="a picture (default: png), an interactive page, or the tables; of a study only this (default: png and the "
        "tables)")  # fmt: skip
    add("--width", type=float, metavar="INCHES", help="width of the picture in a paper: 3.25 for one column of most, "
        "6.75 for two; letters then have 8 points (default: for a screen)")  # fmt: skip
    add("--best", action="store_true", help="mark the best mean (bold) and the second (underlined) in md and tex")
    add("--output", type=Path, metavar="DIR", help="folder for the files (default: that of the runs, if it is one)")
    runs = parser.add_argument_group("without --study").add_argument
    runs("--metric", help="column of metrics.csv (default: test/acc, else val/acc, else a loss)")
    runs("--x", help="round (default), time, comm/rounds, comm/bytes (both ways), comm/bytes_up, gradients or another "
        "cumulative column")  # fmt: skip
    runs("--budget", type=float, help="add a column: the metric at the last evaluation within this budget of --x")
    runs("--target", type=float, help="add columns: rounds, bytes, gradients and seconds until the metric reaches this "
        "value, as in metrics.csv")  # fmt: skip
    runs("--goal", choices=("min", "max"), help="whether the smallest or the largest value of the metric is the best")
    runs("--baseline", metavar="METHOD", help="add a table: differences to this method with intervals, paired by seed")
    study = parser.add_argument_group("of a study").add_argument
    study("--study", metavar="FILE", help="file of the study, or the name of a shipped study")
    study("--profile", metavar="NAME", help="profile (default: full, or of --from)")
    study("--from", type=Path, nargs="+", metavar="DIR", dest="source",
        help="join the runs in several folders; results.csv and curves.csv are enough")  # fmt: skip
    return parser


def _lines(table: StudyTable) -> list[list[object]]:
    """Returns a line for each method with unscaled numbers; without a value for some seed the mean is empty."""
    names = [statistic for (statistic,) in table.columns]
    columns = ["last10" if name == f"last {LAST}" else name.replace(" ", "_") for name in names]
    lines: list[list[object]] = [
        ["metric", "method", "seeds", "rounds", *(f"{name}_{part}" for name in columns for part in ("mean", "std"))]
    ]
    for row in table.rows:
        cells = [table.cells[row, column] for column in table.columns]
        runs, found = cells[0].runs, [cell.summary for cell in cells]
        numbers = [number for one in found for number in ((one.mean, one.std) if one.found is None else (None, None))]
        lines.append([cells[0].names["metric"], *row, len(runs), max(run.rounds for run in runs), *numbers])
    return lines


def _write(options: argparse.Namespace, contents: Mapping[str, bytes]) -> list[Path]:
    # A report with other options gets a file name of its own, so that it does not replace the default one.
    parts = ["report", options.metric, options.x if options.x != "round" else None]
    stem = "-".join(part.replace("/", "_") for part in parts if part)
    folder: Path = options.output or (options.runs[0] if len(options.runs) == 1 else Path())
    for kind, content in contents.items():
        write_atomically(folder / f"{stem}.{kind}", content, "--output")
    return [folder / f"{stem}.{kind}" for kind in contents]
