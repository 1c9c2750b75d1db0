"""Numbers of runs for tables and curves: means over seeds with their words, and what a run has cost by a round."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import stdev
from typing import NamedTuple

from lightning_fed.errors import expect
from lightning_fed.lab.report.load import MeasuredRun, Method
from lightning_fed.runs.statistics import mean_of, missing_rounds, words_of

__all__ = [
    "COSTS", "PREFERRED", "TO_REACH", "Cost", "Summary", "axis_label", "columns_of", "counted", "is_measured",
    "is_share", "notes_on_ends", "notes_on_window", "over_seeds", "spent", "summarize", "summarize_found",
]  # fmt: skip

PREFERRED = ("test/acc", "val/acc", "test/loss", "val/loss", "train/loss")
"""Metrics by default: the first one that all runs have is reported."""


class Cost(NamedTuple):
    """What a run spends, as an x-axis.

    Attributes:
        label: Its label.
        unit: The unit that gets SI prefixes; None for plain numbers.
        columns: The columns of metrics.csv whose sum it is, if it is no column itself.
    """

    label: str
    unit: str | None = None
    columns: tuple[str, ...] = ()


COSTS = {
    "round": Cost("round"),
    "time": Cost("training time", "s", ("time/round",)),
    "samples": Cost("training samples seen", ""),
    "gradients": Cost("gradient evaluations, samples", ""),
    "comm/rounds": Cost("communication rounds"),
    "comm/bytes": Cost("sent both ways", "B", ("comm/bytes_down", "comm/bytes_up")),
    "comm/bytes_up": Cost("sent by the clients", "B"),
    "comm/bytes_down": Cost("sent to the clients", "B"),
    "simulated/time": Cost("simulated time", "s"),
}
"""Every cost that a report knows; a column of another name can be an x-axis too."""
TO_REACH = ("round", "comm/bytes", "gradients", "time")
"""Those that reports say reaching a target took."""

_SHARES = ("acc", "accs", "accuracy", "accuracies")


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation (n - 1) over seeds; the deviation is None for one seed.

    If only some seeds have a value, there is no mean, and ``found`` is their number.
    """

    mean: float
    std: float | None
    found: int | None = None

    def text(self, seeds: int, percent: bool) -> str:
        """Writes the summary for a table."""
        if self.found is not None:
            return f"{self.found} of {counted(seeds, 'seed')}"
        scale, mean, std = (100, ".2f", ".2f") if percent else (1, ".4g", ".2g")
        return f"{scale * self.mean:{mean}}" + ("" if self.std is None else f" ± {scale * self.std:{std}}")


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


def counted(number: float, noun: str) -> str:
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


def spent(run: MeasuredRun, x: str, rounds: Sequence[int]) -> list[float]:
    """Returns the cost of a run by the end of some rounds.

    The unit is ``round``, ``time`` (cumulative, in seconds), ``comm/bytes`` (both ways) or a cumulative column.
    """
    totals = [float(at) if x == "round" else 0.0 for at in rounds]
    for column in columns_of(x):
        there = column in run.columns
        expect(there, f"Expected `--x` to name a column of every run, got {x!r}, missing in {run.path}.")
        values = list(run.columns[column].values())
        cumulative = [0.0, *(accumulate(values) if x == "time" else values)]
        measured = list(run.columns[column])
        # Cumulative counts start at 0, and do not change in rounds without training.
        totals = [so_far + cumulative[bisect_right(measured, at)] for so_far, at in zip(totals, rounds, strict=True)]
    return totals


def columns_of(x: str) -> tuple[str, ...]:
    """Returns the columns of metrics.csv whose sum a cost is."""
    return () if x == "round" else (x in COSTS and COSTS[x].columns) or (x,)


def axis_label(x: str) -> tuple[str, str | None]:
    """Returns the label of an x-axis, and the unit that gets SI prefixes."""
    return (COSTS[x].label, COSTS[x].unit) if x in COSTS else (x, None)


def is_measured(methods: Sequence[Method], x: str) -> bool:
    """Tells whether every run has measured x."""
    return all(column in run.columns for column in columns_of(x) for method in methods for run in method.runs)
