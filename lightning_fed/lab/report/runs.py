"""Run folders as methods, and their numbers: means over seeds with their words, and what a run has cost by a round."""

import math
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import stdev
from typing import NamedTuple

from lightning_fed.core import one_line
from lightning_fed.errors import FederatedError, expect, expect_choice
from lightning_fed.runs.folder import RunFolder, read_rows, read_run
from lightning_fed.runs.statistics import mean_of, missing_rounds, number_in, words_of

__all__ = [
    "COSTS", "Columns", "Cost", "MeasuredRun", "Method", "PREFERRED", "Summary", "TO_REACH", "axis_label",
    "columns_of", "counted", "group_runs", "is_measured", "is_share", "load_runs", "notes_on_ends",
    "notes_on_window", "over_seeds", "read_metrics", "spent", "summarize", "summarize_found",
]  # fmt: skip

Columns = dict[str, dict[int, float]]
"""Measured values by column and round; rounds without a measurement have no entry."""

PREFERRED = ("test/acc", "val/acc", "test/loss", "val/loss", "train/loss")
"""Metrics by default: the first one that all runs have is reported."""


@dataclass(frozen=True)
class MeasuredRun(RunFolder):
    """A run folder and its measurements."""

    columns: Columns


@dataclass(frozen=True)
class Method:
    """The runs of one configuration, one for each seed, in ascending order of seed."""

    label: str
    runs: tuple[MeasuredRun, ...]


def load_runs(folders: Iterable[Path]) -> tuple[list[MeasuredRun], list[str]]:
    """Returns the runs with measurements at or below some folders, and a sentence for each run that is left out."""
    runs, notes = [], []
    folders = list(folders)
    for path in _run_folders(folders):
        try:
            run = read_run(path)
            shown = {name: one_line(getattr(run, name)) for name in ("label", "name", "group")}
            damage = list[str]()
            runs.append(MeasuredRun(**{**vars(run), **shown}, columns=read_metrics(run.metrics, damage)))
            notes += damage
        except (OSError, ValueError, TypeError) as error:
            notes.append(f"Left out {path}, which cannot be read ({type(error).__name__}: {error}).")
    measured = [run for run in runs if run.columns]
    notes += [f"Left out {run.path}, which holds no measurement yet." for run in runs if not run.columns]
    if not measured:
        where = ", ".join(str(folder) for folder in folders)
        reason = f" ({notes[0]})" if notes else ""
        raise FederatedError(
            f"Expected folders of runs to report on, found no run with measurements in {where}{reason}: "
            "name the folder given as `--trainer.default_root_dir` to `lightning-fed fit`, or one below it."
        )
    return measured, notes


def group_runs(runs: Sequence[MeasuredRun], metric: str) -> tuple[list[Method], list[str]]:
    """Groups runs by configuration; for each seed it keeps the newest run that measured the metric.

    If two configurations have the same label, the name of their runs or else their hash is added. Returns the methods,
    in order of their first run, and a sentence for everything that is left out.
    """
    columns = sorted({column for run in runs for column in run.columns})
    if metric not in columns:
        from lightning_fed.cli.class_names import did_you_mean  # imported here, as it loads torch

        if meant := did_you_mean(metric, columns):
            there = ", ".join(columns)
            raise FederatedError(f"Expected `--metric` to be one of {there}, got {metric!r}: did you mean {meant}?")
    expect_choice("--metric", metric, columns)
    usable = [run for run in runs if metric in run.columns]
    notes = [f"Left out {run.path}, which did not measure {metric}." for run in runs if metric not in run.columns]
    newest: dict[tuple[str, int], MeasuredRun] = {}
    for run in sorted(usable, key=lambda run: run.created):
        newest[run.group, run.seed] = run
    if len(newest) < len(usable):
        notes.append(f"Left out older runs of the same configuration and seed: {len(usable) - len(newest)}.")
    groups: dict[str, list[MeasuredRun]] = {}
    for run in newest.values():
        groups.setdefault(run.group, []).append(run)
    labels = _unique_labels([members[-1] for members in groups.values()])
    order = [tuple(sorted(members, key=lambda run: run.seed)) for members in groups.values()]
    return [Method(label, members) for label, members in zip(labels, order, strict=True)], notes


def read_metrics(path: Path, notes: list[str] | None = None) -> Columns:
    """Returns the measured cells of a ``metrics.csv``; of two rows of a round the later counts; see ``read_rows``."""
    columns: Columns = {}
    for row in read_rows(path, notes):
        at = int(row.pop("round"))
        for name, cell in row.items():
            with suppress(ValueError):  # an empty cell means not measured
                columns.setdefault(name, {})[at] = number_in(cell)
    return {one_line(name): dict(sorted(values.items())) for name, values in columns.items()}


def _run_folders(folders: Iterable[Path]) -> Iterator[Path]:
    seen = set()
    for folder in folders:
        expect(folder.is_dir(), f"Expected a folder of runs to report on, got {folder}, which is not a folder.")
        for at, below, files in os.walk(folder):
            below.sort()
            if "run.json" in files:
                below.clear()
                if (resolved := Path(at).resolve()) not in seen:
                    seen.add(resolved)
                    yield Path(at)


def _unique_labels(runs: Sequence[MeasuredRun]) -> list[str]:
    labels = [run.label for run in runs]
    for additions in ([run.name for run in runs], [run.group[:8] for run in runs]):
        counts = Counter(labels)
        labels = [
            f"{label} ({addition})" if counts[label] > 1 and addition else label
            for label, addition in zip(labels, additions, strict=True)
        ]
    return labels


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
