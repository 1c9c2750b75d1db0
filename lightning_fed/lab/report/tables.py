"""The table of methods: final, best and mean of the last 10 rounds, over seeds."""

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev

from lightning_fed.core.files import write_atomically
from lightning_fed.lab.report.load import MeasuredRun, Method
from lightning_fed.lab.report.text import no_formula
from lightning_fed.runs.statistics import LAST, lower_is_better, run_statistic

__all__ = [
    "Row",
    "Summary",
    "format_table",
    "is_share",
    "method_rows",
    "summarize",
    "summarize_found",
    "table_cells",
    "write_csv",
]


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation (n - 1) over seeds; the latter None for one seed.

    Where only some seeds have a value, there is no mean, and ``found`` says how many.
    """

    mean: float
    std: float | None
    found: int | None = None


@dataclass(frozen=True)
class Row:
    """One method in the table.

    Attributes:
        method: Its label.
        seeds: Number of seeds.
        last_rounds: The last evaluated round of each seed's run.
        final: Value at a run's own last evaluated round, over seeds.
        best: Best value over a run's evaluated rounds, over seeds.
        last: Mean over the evaluated ones of a run's last 10 rounds, over seeds.
        derived: Further columns, over seeds.
    """

    method: str
    seeds: int
    last_rounds: tuple[int, ...]
    final: Summary
    best: Summary
    last: Summary
    derived: dict[str, Summary] = field(default_factory=dict)

    def summaries(self) -> dict[str, Summary]:
        """All that is averaged over seeds, by column."""
        return {"final": self.final, "best": self.best, f"last{LAST}": self.last, **self.derived}


def summarize(values: Sequence[float]) -> Summary:
    """Returns the mean and the sample standard deviation of at least one value."""
    mean = fmean(values)
    if len(values) == 1:
        return Summary(mean, None)
    return Summary(mean, stdev(values) if math.isfinite(mean) else math.nan)


def is_share(metric: str, values: Sequence[float]) -> bool:
    """Tells whether a metric is an accuracy given as a share in [0, 1], to be shown in percent."""
    return "acc" in metric.lower() and all(0 <= value <= 1 for value in values if math.isfinite(value))


def method_rows(
    methods: Sequence[Method], metric: str, derived: Mapping[str, Callable[[MeasuredRun], float]] | None = None
) -> list[Row]:
    """Summarises each method, best final mean first and diverged (NaN) last.

    Args:
        methods: The methods.
        metric: A column.
        derived: The value for one run of each further column, NaN where it has none.
    """
    sign = 1 if lower_is_better(metric) else -1
    rows = [_row(method, metric, derived or {}) for method in methods]
    return sorted(rows, key=lambda row: (math.isnan(row.final.mean), sign * row.final.mean))


def _row(method: Method, metric: str, derived: Mapping[str, Callable[[MeasuredRun], float]]) -> Row:
    curves = [run.columns[metric] for run in method.runs]
    names = ("final", "best", f"last {LAST}")
    final, best, last = (summarize([run_statistic(curve, name, metric) for curve in curves]) for name in names)
    return Row(
        method=method.label,
        seeds=len(curves),
        last_rounds=tuple(max(curve) for curve in curves),
        final=final,
        best=best,
        last=last,
        derived={name: summarize_found([value(run) for run in method.runs]) for name, value in derived.items()},
    )


def summarize_found(values: Sequence[float]) -> Summary:
    """Returns no mean where a seed has no value: that of the others would flatter the method."""
    found = sum(not math.isnan(value) for value in values)
    return summarize(values) if found == len(values) else Summary(math.nan, None, found)


def table_cells(rows: Sequence[Row], metric: str) -> list[list[str]]:
    """Writes the header and a line for each method; accuracies in percent."""
    percent = is_share(metric, [summary.mean for row in rows for summary in (row.final, row.best, row.last)])
    names = list(rows[0].summaries())
    in_percent = {name for name in names if percent and (name not in rows[0].derived or name.startswith("at "))}
    titles = {f"last{LAST}": f"mean of last {LAST}"}
    header = [titles.get(name, name) + (" (%)" if name in in_percent else "") for name in names]
    lines = [
        [_text(summary, row.seeds, name in in_percent) for name, summary in row.summaries().items()] for row in rows
    ]
    return [["method", "seeds", *header]] + [
        [row.method, str(row.seeds), *line] for row, line in zip(rows, lines, strict=True)
    ]


def format_table(rows: Sequence[Row], metric: str) -> str:
    """Lays the table out as plain text."""
    lines = table_cells(rows, metric)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _text(summary: Summary, seeds: int, percent: bool) -> str:
    if summary.found is not None:
        return f"{summary.found} of {seeds} seeds"
    scale, mean, std = (100, ".2f", ".2f") if percent else (1, ".4g", ".2g")
    deviation = "-" if summary.std is None else f"{scale * summary.std:{std}}"
    return f"{scale * summary.mean:{mean}} ± {deviation}"


def write_csv(rows: Sequence[Row], metric: str, path: Path) -> None:
    """Writes the table with values as measured; empty cells for the deviation of one seed, and where seeds lack one."""
    names = [name.replace(" ", "_") for name in rows[0].summaries()]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(
        ["metric", "method", "seeds", "rounds", *(f"{n}_{part}" for n in names for part in ("mean", "std"))]
    )
    for row in rows:
        summaries = row.summaries().values()
        cells = [cell for s in summaries for cell in ((s.mean, s.std) if s.found is None else (None, None))]
        writer.writerow([metric, no_formula(row.method), row.seeds, max(row.last_rounds), *cells])
    write_atomically(path, text.getvalue().encode(), "--output")
