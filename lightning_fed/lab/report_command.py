"""The command ``lightning-fed report RUNS... [--metric NAME] [--x NAME] [--format html] [--output DIR]``."""

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from lightning_fed.core.files import png, write_atomically
from lightning_fed.errors import FederatedError, expect_number
from lightning_fed.lab.common import CommandParser, one_line
from lightning_fed.lab.report import tables
from lightning_fed.lab.report.load import MeasuredRun, Method, group_runs, load_runs
from lightning_fed.lab.report.page import report_page
from lightning_fed.lab.report.plots import panels_figure
from lightning_fed.runs.statistics import LAST, Goal, first_as_good, goal_of, known_goal

__all__ = ["at_budget", "choose_metric", "derived_columns", "main", "make_parser", "to_target"]

# The costs of a target, besides x, that are shown if every run measured them.
_COSTS = ("round", "comm/bytes", "gradients", "time")


def main(argv: list[str]) -> int:
    """Prints the table over methods and seeds, writes it as CSV and draws the picture or the page; returns 0.

    With ``--study`` it makes the report of a study instead.
    """
    if any(word.partition("=")[0] == "--study" for word in argv):
        from lightning_fed.lab.runner.report import main as report_study

        return report_study(argv)
    options = _parser().parse_args(argv)
    runs, notes = load_runs(options.runs)
    metric = options.metric or choose_metric(runs)
    methods, more_notes = group_runs(runs, metric)
    said = {run.goals[metric] for run in runs if metric in run.goals}
    goal = known_goal(metric, options.goal or (said.pop() if len(said) == 1 else None))
    derived = derived_columns(methods, metric, options.x, options.budget, options.target, goal)
    rows = tables.method_rows(methods, metric, derived, goal)
    curves = [run.columns[metric] for method in methods for run in method.runs]
    notes += [*more_notes, *tables.notes_on_ends(map(max, curves)), *tables.notes_on_window(curves, f"last {LAST}")]
    if goal is None:
        notes.append(f"The best of {metric} is not known by its name: say it by `--goal min` or `--goal max`.")
    written = _write(options, rows, metric, notes)
    print(f"{tables.table_title(rows, metric)}\n")
    print(tables.format_table(rows, metric))
    for note in (*notes, "written: " + ", ".join(str(path) for path in written)):
        print(f"\n{one_line(note)}")
    return 0


def choose_metric(runs: Sequence[MeasuredRun]) -> str:
    """Returns the first of test and validation accuracy, then losses, that all runs measured; one is required."""
    for metric in tables.PREFERRED:
        if all(metric in run.columns for run in runs):
            return metric
    columns = ", ".join(sorted({column for run in runs for column in run.columns}))
    raise FederatedError(f"Expected a metric that every run measured, got none: choose `--metric` of {columns}.")


def at_budget(run: MeasuredRun, metric: str, x: str, budget: float) -> float:
    """Returns the metric at the last evaluation within a budget; NaN if no evaluation is."""
    curve = run.columns[metric]
    within = [
        value for value, cost in zip(curve.values(), tables.spent(run, x, list(curve)), strict=True) if cost <= budget
    ]
    return within[-1] if within else math.nan


def to_target(run: MeasuredRun, metric: str, x: str, target: float, goal: Goal | None = None) -> float:
    """Returns the cost up to the first evaluation that reaches the target; NaN if none does."""
    reached = first_as_good(run.columns[metric], metric, target, goal)
    return math.nan if reached is None else tables.spent(run, x, [reached])[0]


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
        low, high = (0, 1) if tables.is_share(metric, values) else (-math.inf, math.inf)
        expect_number("--target", target, least=low, most=high)
        costs = [x, *(cost for cost in _COSTS if cost != x and tables.is_measured(methods, cost))]
        reach = partial(to_target, metric=metric, target=target, goal=goal_of(metric, goal, "--goal"))
        columns |= {f"{cost} to {target:g}": partial(reach, x=cost) for cost in costs}
    return columns


def make_parser() -> CommandParser:
    """Makes a parser with the options of this command without ``--study`` and with it."""
    from lightning_fed.lab.runner import report

    return CommandParser(parents=[_parser(), report._parser()], conflict_handler="resolve", add_help=False)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="lightning-fed report",
        description="Makes a table and a picture of a metric over methods and seeds from run folders. Runs that differ "
        "only in their seed are one method; the newest run of each seed counts.",
        epilog="`lightning-fed report --study FILE` makes the tables of a study; `--study FILE --help` lists options.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="folder of a run, or a folder above runs")
    parser.add_argument("--metric", help="column of metrics.csv (default: test/acc, else val/acc, else a loss)")
    parser.add_argument(
        "--x",
        default="round",
        help="round (default), time, comm/rounds, comm/bytes (both ways), comm/bytes_up, gradients or another "
        "cumulative column",
    )
    parser.add_argument(
        "--budget", type=float, help="add a column: the metric at the last evaluation within this budget of --x"
    )
    parser.add_argument(
        "--target",
        type=float,
        help="add columns: rounds, bytes, gradients and seconds until the metric reaches this value, as in metrics.csv",
    )
    parser.add_argument(
        "--goal", choices=("min", "max"), help="whether the smallest or the largest value of the metric is the best"
    )
    parser.add_argument(
        "--format", choices=("png", "html"), default="png", help="a picture (default) or an interactive page"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="folder for report.png (or report.html) and report.csv (default: RUNS if it is one folder, else here)",
    )
    return parser


def _write(options: argparse.Namespace, rows: Sequence[tables.Row], metric: str, notes: Sequence[str]) -> list[Path]:
    # A report with other options gets a file name of its own, so that it does not replace the default one.
    parts = ["report", options.metric, options.x if options.x != "round" else None]
    stem = "-".join(part.replace("/", "_") for part in parts if part)
    folder: Path = options.output or (options.runs[0] if len(options.runs) == 1 else Path())
    picture, table = folder / f"{stem}.{options.format}", folder / f"{stem}.csv"
    if options.format == "html":
        drawn = report_page(rows, metric, options.x, notes).encode()
    else:
        methods = {index: row.method for index, row in enumerate(rows)}
        drawn = png(panels_figure({("", metric): methods}, options.x), dpi=150)
    tables.write_csv(rows, metric, table)
    write_atomically(picture, drawn, "--output")
    return [picture, table]
