"""Reads run folders (``run.json`` and ``metrics.csv``) and groups them into methods."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_fed.errors import FederatedError, expect, expect_choice
from lightning_fed.lab.common import one_line
from lightning_fed.runs.folder import RunFolder, read_rows, read_run
from lightning_fed.runs.statistics import number_in

__all__ = ["Columns", "Method", "MeasuredRun", "group_runs", "load_runs", "read_metrics"]

Columns = dict[str, dict[int, float]]
"""Measured values by column and round; rounds without a measurement have no entry."""


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
        from lightning_fed.cli.suggestions import did_you_mean  # imported here, as it loads torch

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
