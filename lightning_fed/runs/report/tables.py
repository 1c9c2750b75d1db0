"""The table of methods: final, best and mean of the last rounds, over seeds."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from lightning_fed.core.files import write_atomically
from lightning_fed.runs.report.load import Method

__all__ = [
    "LAST",
    "Row",
    "Summary",
    "format_table",
    "is_share",
    "lower_is_better",
    "method_rows",
    "summarize",
    "write_csv",
]

LAST = 10
"""Evaluated rounds at the end of a run whose mean is reported."""


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation (n - 1) over seeds; the latter None for one seed."""

    mean: float
    std: float | None


@dataclass(frozen=True)
class Row:
    """One method in the table.

    Attributes:
        method: Its label.
        seeds: Number of seeds.
        last_rounds: The last evaluated round of each seed's run.
        final: Value at a run's own last evaluated round, over seeds.
        best: Best value over a run's evaluated rounds, over seeds.
        last: Mean over a run's last 10 evaluated rounds (fewer if it has fewer), over seeds.
    """

    method: str
    seeds: int
    last_rounds: tuple[int, ...]
    final: Summary
    best: Summary
    last: Summary


def summarize(values: Sequence[float]) -> Summary:
    """Returns the mean and the sample standard deviation of at least one value."""
    mean = fmean(values)
    if len(values) == 1:
        return Summary(mean, None)
    return Summary(mean, stdev(values) if math.isfinite(mean) else math.nan)


def lower_is_better(metric: str) -> bool:
    """Tells by its name whether a metric is better when smaller."""
    words = ("loss", "error", "perplexity", "time", "bytes", "dissimilarity", "distance", "gradient/norm")
    return any(word in metric.lower() for word in words)


def is_share(metric: str, values: Sequence[float]) -> bool:
    """Tells whether a metric is an accuracy given as a share in [0, 1], to be shown in percent."""
    return "acc" in metric.lower() and all(0 <= value <= 1 for value in values if math.isfinite(value))


def method_rows(methods: Sequence[Method], metric: str) -> list[Row]:
    """Summarises each method, best final mean first and diverged (NaN) last."""
    sign = 1 if lower_is_better(metric) else -1
    rows = [_row(method, metric) for method in methods]
    return sorted(rows, key=lambda row: (math.isnan(row.final.mean), sign * row.final.mean))


def _row(method: Method, metric: str) -> Row:
    best = min if lower_is_better(metric) else max
    curves = [run.columns[metric] for run in method.runs]
    values = [list(curve.values()) for curve in curves]
    return Row(
        method=method.label,
        seeds=len(curves),
        last_rounds=tuple(max(curve) for curve in curves),
        final=summarize([run[-1] for run in values]),
        best=summarize([best((v for v in run if not math.isnan(v)), default=math.nan) for run in values]),
        last=summarize([fmean(run[-LAST:]) for run in values]),
    )


def format_table(rows: Sequence[Row], metric: str) -> str:
    """Lays the table out as plain text; accuracies in percent."""
    percent = is_share(metric, [summary.mean for row in rows for summary in (row.final, row.best, row.last)])
    unit = " (%)" if percent else ""
    header = ["method", "seeds", f"final{unit}", f"best{unit}", f"mean of last {LAST}{unit}"]
    lines = [header] + [
        [row.method, str(row.seeds), *(_text(summary, percent) for summary in (row.final, row.best, row.last))]
        for row in rows
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    rule = ["-" * width for width in widths]
    lines.insert(1, rule)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _text(summary: Summary, percent: bool) -> str:
    scale, mean, std = (100, ".2f", ".2f") if percent else (1, ".4g", ".2g")
    deviation = "-" if summary.std is None else f"{scale * summary.std:{std}}"
    return f"{scale * summary.mean:{mean}} ± {deviation}"


def write_csv(rows: Sequence[Row], metric: str, path: Path) -> None:
    """Writes the table with values as measured; an empty cell for the deviation of one seed."""
    names = ["final", "best", f"last{LAST}"]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(
        ["metric", "method", "seeds", "rounds", *(f"{n}_{part}" for n in names for part in ("mean", "std"))]
    )
    for row in rows:
        cells = [cell for summary in (row.final, row.best, row.last) for cell in (summary.mean, summary.std)]
        writer.writerow([metric, row.method, row.seeds, max(row.last_rounds), *cells])
    write_atomically(path, text.getvalue().encode(), "--output")
