"""The command ``lightning-fed report RUNS... [--metric NAME] [--x NAME] [--format html] [--output DIR]``."""

import argparse
import io
import math
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from lightning_fed.core.files import write_atomically
from lightning_fed.errors import FederatedError, expect_number
from lightning_fed.lab.report.budgets import derived_columns
from lightning_fed.lab.report.load import MeasuredRun, Method, group_runs, load_runs
from lightning_fed.lab.report.page import report_page
from lightning_fed.lab.report.plots import curves_figure
from lightning_fed.lab.report.tables import Row, format_table, is_share, method_rows, write_csv
from lightning_fed.runs.statistics import LAST, lower_is_better, missing_rounds

__all__ = ["RunsParser", "choose_metric", "main"]

PREFERRED = ("test/acc", "val/acc", "test/loss", "val/loss", "train/loss")


class RunsParser(argparse.ArgumentParser):
    """The parser of a command over folders of runs; tells a mistake in one sentence, as the other commands do."""

    def error(self, message: str) -> NoReturn:
        """Raises the sentence."""
        raise FederatedError(f"Expected `{self.prog} RUNS...` with options that `{self.prog} --help` lists: {message}.")


def main(argv: list[str]) -> int:
    """Prints the table over methods and seeds, writes it as CSV and draws the picture or the page; returns 0.

    With ``--study`` it is the report of a study.
    """
    if any(word.partition("=")[0] == "--study" for word in argv):
        from lightning_fed.lab.runner.report import main as report_study

        return report_study(argv)
    options = _parser().parse_args(argv)
    runs, notes = load_runs(options.runs)
    metric = options.metric or choose_metric(runs)
    methods, more_notes = group_runs(runs, metric)
    rows = method_rows(methods, metric, _derived(options, methods, metric))
    order = [row.method for row in rows]
    methods.sort(key=lambda method: order.index(method.label))
    notes += [*more_notes, *_length_notes(rows), *_window_notes(methods, metric)]
    written = _write(options, methods, rows, metric, notes)
    print(f"{metric}, mean ± std over seeds\n")
    print(format_table(rows, metric))
    for note in notes:
        print(f"\n{note}")
    print("\nwritten: " + ", ".join(str(path) for path in written))
    _print_next(options, methods, metric)
    return 0


def choose_metric(runs: Sequence[MeasuredRun]) -> str:
    """Returns the first of test and validation accuracy, then losses, that all runs measured; there must be one."""
    for metric in PREFERRED:
        if all(metric in run.columns for run in runs):
            return metric
    columns = ", ".join(sorted({column for run in runs for column in run.columns}))
    raise FederatedError(
        f"Expected a metric that every run measured among {', '.join(PREFERRED)}, found none: "
        f"choose one of {columns} with `--metric`."
    )


def _parser() -> RunsParser:
    parser = RunsParser(
        prog="lightning-fed report",
        description="Table and picture of a metric over methods and seeds, from the folders of runs. Runs that differ "
        "in nothing but their seed are one method; the newest run of each seed counts.",
        epilog="`lightning-fed report --study FILE` makes the tables of a study; `--study FILE --help` lists options.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="folder of a run, or any folder above")
    parser.add_argument("--metric", help="column of metrics.csv (default: test/acc, else val/acc, else a loss)")
    parser.add_argument(
        "--x",
        default="round",
        help="round (default), time, comm/rounds, comm/bytes (both ways), comm/bytes_up, gradients or another "
        "cumulative column",
    )
    parser.add_argument(
        "--budget", type=float, help="a column with the metric at the last evaluation within it, in --x"
    )
    parser.add_argument(
        "--target",
        type=float,
        help="columns with the rounds, bytes, gradients and seconds to the first evaluation as good, as in metrics.csv",
    )
    parser.add_argument(
        "--format", choices=("png", "html"), default="png", help="a picture, or a page to look around in"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="folder for report.png (or report.html) and report.csv (default: RUNS if it is one folder, else here)",
    )
    return parser


def _derived(
    options: argparse.Namespace, methods: Sequence[Method], metric: str
) -> dict[str, Callable[[MeasuredRun], float]]:
    values = [value for method in methods for run in method.runs for value in run.columns[metric].values()]
    if options.budget is not None:
        expect_number("--budget", options.budget, least=0)
    if options.target is not None:
        low, high = (0, 1) if is_share(metric, values) else (-math.inf, math.inf)
        expect_number("--target", options.target, least=low, most=high)
    return derived_columns(methods, metric, options.x, options.budget, options.target)


def _write(
    options: argparse.Namespace, methods: Sequence[Method], rows: Sequence[Row], metric: str, notes: Sequence[str]
) -> list[Path]:
    # A report that was asked for in particular does not replace the usual one.
    parts = ["report", options.metric, options.x if options.x != "round" else None]
    stem = "-".join(part.replace("/", "_") for part in parts if part)
    folder: Path = options.output or (options.runs[0] if len(options.runs) == 1 else Path())
    picture, table = folder / f"{stem}.{options.format}", folder / f"{stem}.csv"
    drawn = io.BytesIO()
    if options.format == "html":
        others = [name for name in _shared(methods) if name in PREFERRED and name != metric]
        drawn.write(report_page(methods, rows, metric, options.x, others, notes).encode())
    else:
        curves_figure(methods, metric, options.x).savefig(drawn, format="png", dpi=150)
    write_csv(rows, metric, table)
    write_atomically(picture, drawn.getvalue(), "--output")
    return [picture, table]


def _shared(methods: Sequence[Method]) -> list[str]:
    """The columns that every run measured."""
    return sorted(set.intersection(*(set(run.columns) for method in methods for run in method.runs)))


def _length_notes(rows: Sequence[Row]) -> list[str]:
    if len({last for row in rows for last in row.last_rounds}) == 1:
        return []
    ends = ", ".join(f"{row.method} {_ends(row.last_rounds)}" for row in rows)
    return [
        f"The runs end at different rounds ({ends}): each counts in the table as far as it goes, and the picture shows "
        "the rounds that all seeds of a method share."
    ]


def _window_notes(methods: Sequence[Method], metric: str) -> list[str]:
    statistic = f"last {LAST}"
    missing = {m.label: max(missing_rounds(run.columns[metric], statistic) for run in m.runs) for m in methods}
    if not any(missing.values()):
        return []
    counts = ", ".join(f"{label} {count}" for label, count in missing.items())
    return [f"Of the last {LAST} rounds those are averaged that were evaluated (not evaluated: {counts})."]


def _ends(last_rounds: Sequence[int]) -> str:
    first, last = min(last_rounds), max(last_rounds)
    return f"{last}" if first == last else f"{first} to {last}"


def _print_next(options: argparse.Namespace, methods: Sequence[Method], metric: str) -> None:
    commands = []
    run = methods[0].runs[-1]
    if (run.path / "config.yaml").is_file():
        seed = 1 + max(run.seed for run in methods[0].runs)
        commands.append(["fit", "--config", str(run.path / "config.yaml"), "--seed_everything", str(seed)])
    shared = _shared(methods)
    other = next(
        (name for name in PREFERRED if name in shared and lower_is_better(name) != lower_is_better(metric)), None
    )
    x = next((name for name in ("comm/bytes_up", "time/round") if name in shared and options.x == "round"), None)
    if other or x:
        words = ["report", *map(str, options.runs), "--metric", other or metric]
        commands.append(words + (["--x", x.replace("time/round", "time")] if x else []))
    if commands:
        print("\nto try next (one more seed of the first method; another look at the same runs):")
    for command in commands:
        print(f"  {_program()} {shlex.join(command)}")


def _program() -> str:
    called = Path(sys.argv[0])
    if called.name == "cli.py":
        return f"python {called}"
    return str(called) if called.name == "lightning-fed" and shutil.which("lightning-fed") is None else "lightning-fed"
