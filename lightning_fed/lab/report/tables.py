"""The table of methods: final and best value and mean of the last 10 rounds, over seeds, and the costs of runs."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import stdev

from lightning_fed.core.files import write_atomically
from lightning_fed.errors import FederatedError
from lightning_fed.lab.common import aligned, csv_text
from lightning_fed.lab.report.load import MeasuredRun, Method
from lightning_fed.runs.statistics import LAST, Goal, known_goal, mean_of, missing_rounds, run_statistic, words_of

__all__ = [
    "PREFERRED", "Row", "Summary", "X_SUMS", "columns_of", "counted", "format_table", "is_measured", "is_share",
    "method_rows", "notes_on_ends", "notes_on_window", "over_seeds", "spent", "summarize", "summarize_found",
    "table_cells", "table_title", "write_csv",
]  # fmt: skip

PREFERRED = ("test/acc", "val/acc", "test/loss", "val/loss", "train/loss")
"""Metrics by default: the first one that all runs have is reported."""

# Costs that are no column themselves, with the columns whose sum they are.
X_SUMS = {"comm/bytes": ("comm/bytes_down", "comm/bytes_up"), "time": ("time/round",)}

_STATISTICS = {"final": "final", "best": "best", f"last{LAST}": f"last {LAST}"}
_SHARES = ("acc", "accs", "accuracy", "accuracies")


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation (n - 1) over seeds; the deviation is None for one seed.

    If only some seeds have a value, there is no mean, and ``found`` is their number.
    """

    mean: float
    std: float | None
    found: int | None = None

    def text(self, seeds: int, percent: bool, single: str = "") -> str:
        """Writes the summary for a table; ``single`` follows the value if there is only one seed."""
        if self.found is not None:
            return f"{self.found} of {counted(seeds, 'seed')}"
        scale, mean, std = (100, ".2f", ".2f") if percent else (1, ".4g", ".2g")
        return f"{scale * self.mean:{mean}}" + (single if self.std is None else f" ± {scale * self.std:{std}}")


@dataclass(frozen=True)
class Row:
    """One method in the table."""

    method: Method
    last_rounds: tuple[int, ...]  # of each seed's run, the last evaluated one
    summaries: dict[str, Summary]  # by column: statistics of the metric, then those for a budget and a target


def summarize(values: Sequence[float]) -> Summary:
    """Returns the mean and the sample standard deviation of at least one value."""
    mean = mean_of(values)
    if len(values) == 1:
        return Summary(mean, None)
    return Summary(mean, stdev(values) if math.isfinite(mean) else math.nan)


def summarize_found(values: Sequence[float]) -> Summary:
    """Like ``summarize``, but without a mean if a seed has no value: that of the others would flatter the method."""
    found = sum(not math.isnan(value) for value in values)
    return summarize(values) if found == len(values) else Summary(math.nan, None, found)


def counted(number: int, noun: str) -> str:
    """Writes a number with its noun: ``1 seed``, ``3 seeds``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def over_seeds(counts: Iterable[int]) -> str:
    """Says what the cells of a table are, given the number of seeds of each."""
    least, most = min(counts := [*counts]), max(counts)
    if most == 1:
        return "one seed"
    return f"mean ± std over {counted(most, 'seed') if least == most else f'{least} to {most} seeds'}"


def is_share(metric: str, values: Sequence[float]) -> bool:
    """Tells whether a metric is an accuracy in [0, 1], which tables show in percent."""
    words = {word.rstrip("0123456789") for word in words_of(metric)}
    return not words.isdisjoint(_SHARES) and all(0 <= value <= 1 for value in values if math.isfinite(value))


def method_rows(
    methods: Sequence[Method], metric: str, derived: Mapping[str, Callable[[MeasuredRun], float]] | None = None,
    goal: Goal | None = None,
) -> list[Row]:  # fmt: skip
    """Summarises each method; the best final mean comes first, diverged methods (NaN) last.

    If nobody knows the goal, methods keep their order. Each function in ``derived`` adds a column; it maps a run to a
    value, or to NaN if there is none.
    """
    rows, goal = [], known_goal(metric, goal)
    for method in methods:
        curves = [run.columns[metric] for run in method.runs]
        summaries = {
            name: summarize([run_statistic(curve, statistic, metric, goal) for curve in curves])
            for name, statistic in _STATISTICS.items()
            if goal or name != "best"
        }
        for name, value in (derived or {}).items():
            summaries[name] = summarize_found([value(run) for run in method.runs])
        rows.append(Row(method, tuple(max(curve) for curve in curves), summaries))
    if goal is None:
        return rows
    sign = 1 if goal == "min" else -1
    return sorted(rows, key=lambda row: (math.isnan(mean := row.summaries["final"].mean), sign * mean))


def table_title(rows: Sequence[Row], metric: str) -> str:
    """Returns the title of the table: its metric and the number of seeds."""
    return f"{metric}, {over_seeds(len(row.method.runs) for row in rows)}"


def table_cells(rows: Sequence[Row], metric: str) -> list[list[str]]:
    """Writes the header and a line for each method, with accuracies in percent.

    There is a column for the number of seeds if methods differ in it; otherwise the title has the number.
    """
    percent = is_share(metric, [one.mean for row in rows for name, one in row.summaries.items() if name in _STATISTICS])
    names = list(rows[0].summaries)
    in_percent = [percent and (name in _STATISTICS or name.startswith("at ")) for name in names]
    titles = {f"last{LAST}": f"mean of last {LAST}"}
    header = [titles.get(name, name) + " (%)" * share for name, share in zip(names, in_percent, strict=True)]
    seeds = [len(row.method.runs) for row in rows]
    differ = len({*seeds}) > 1
    lines = [["method", *["seeds"] * differ, *header]]
    for row, count in zip(rows, seeds, strict=True):
        summaries = zip(row.summaries.values(), in_percent, strict=True)
        cells = (one.text(count, share, " ± -" * differ) for one, share in summaries)
        lines.append([row.method.label, *[str(count)] * differ, *cells])
    return lines


def format_table(rows: Sequence[Row], metric: str) -> str:
    """Writes the table as plain text."""
    head, *lines = table_cells(rows, metric)
    rule = ["-" * max(map(len, column)) for column in zip(head, *lines, strict=True)]
    return aligned([head, rule, *lines])


def notes_on_ends(rounds: Iterable[int]) -> list[str]:
    """Says at which rounds runs end, given the last round of each, unless all are equal."""
    ends = sorted({*rounds})
    if len(ends) < 2:
        return []
    return [f"The runs end at different rounds, {ends[0]} to {ends[-1]}: each counts up to its own end."]


def notes_on_window(curves: Iterable[Mapping[int, float]], statistic: str) -> list[str]:
    """Says how many rounds of a statistic were not evaluated, if there are any."""
    missing = max((missing_rounds(curve, statistic) for curve in curves), default=0)
    were = "was" if missing == 1 else "were"
    note = f"`{statistic}` is the mean of those of its rounds that were evaluated: up to {missing} {were} not."
    return [note] if missing else []


def write_csv(rows: Sequence[Row], metric: str, path: Path) -> None:
    """Writes the table with unscaled values; a deviation of one seed and a mean that does not exist are empty cells."""
    names = [f"{name.replace(' ', '_')}_{part}" for name in rows[0].summaries for part in ("mean", "std")]
    lines: list[list[object]] = [["metric", "method", "seeds", "rounds", *names]]
    for row in rows:
        found = [(one.mean, one.std) if one.found is None else (None, None) for one in row.summaries.values()]
        cells = [cell for pair in found for cell in pair]
        lines.append([metric, row.method.label, len(row.method.runs), max(row.last_rounds), *cells])
    write_atomically(path, csv_text(lines).encode(), "--output")


def spent(run: MeasuredRun, x: str, rounds: Sequence[int]) -> list[float]:
    """Returns the cost of a run by the end of some rounds.

    The unit is ``round``, ``time`` (cumulative, in seconds), ``comm/bytes`` (both ways) or a cumulative column.
    """
    totals = [float(at) if x == "round" else 0.0 for at in rounds]
    for column in columns_of(x):
        if column not in run.columns:
            raise FederatedError(f"Expected `--x` to name a column of every run, got {x!r}, missing in {run.path}.")
        values = list(run.columns[column].values())
        cumulative = [0.0, *(accumulate(values) if x == "time" else values)]
        measured = list(run.columns[column])
        # Cumulative counts start at 0, and do not change in rounds without training.
        totals = [so_far + cumulative[bisect_right(measured, at)] for so_far, at in zip(totals, rounds, strict=True)]
    return totals


def columns_of(x: str) -> tuple[str, ...]:
    """Returns the columns of metrics.csv whose sum a cost is."""
    return () if x == "round" else X_SUMS.get(x, (x,))


def is_measured(methods: Sequence[Method], x: str) -> bool:
    """Tells whether every run has measured x."""
    return all(column in run.columns for column in columns_of(x) for method in methods for run in method.runs)
