"""Reads run folders (``run.json`` and ``metrics.csv``) and groups them into methods."""

import csv
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning_fed.errors import FederatedError

__all__ = ["Columns", "Method", "Run", "group_runs", "load_runs", "read_metrics"]

Columns = dict[str, dict[int, float]]
"""Measured values by column and round; a round without a measurement has no entry."""


@dataclass(frozen=True)
class Run:
    """One run folder.

    Attributes:
        path: The folder.
        group: Hash of the configuration without the seed.
        label: Name of the method, such as FedAvg+SignAgreement.
        name: Name given to the run.
        seed: The run's seed.
        created: Seconds since 1970.
        columns: What was measured.
    """

    path: Path
    group: str
    label: str
    name: str
    seed: int | None
    created: float
    columns: Columns


@dataclass(frozen=True)
class Method:
    """The runs of one configuration, one for each seed, in ascending order of seed."""

    label: str
    runs: tuple[Run, ...]


def load_runs(folders: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """Reads every run at or below some folders.

    Returns:
        The runs that measured anything, and a sentence for each that cannot be used.

    Raises:
        FederatedError: If a folder is missing or there is no run to use.
    """
    runs, notes = [], []
    folders = list(folders)
    for path in _run_folders(folders):
        try:
            runs.append(_read_run(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
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


def group_runs(runs: Sequence[Run], metric: str) -> tuple[list[Method], list[str]]:
    """Groups runs by configuration, keeping the newest run for each seed among those that measured a metric.

    Two configurations with the same label are told apart by the name of their runs, or else by their hash.

    Returns:
        The methods in order of their first run, and a sentence for each thing left out.

    Raises:
        FederatedError: If no run measured the metric.
    """
    usable = [run for run in runs if metric in run.columns]
    if not usable:
        columns = ", ".join(sorted({column for run in runs for column in run.columns}))
        raise FederatedError(f"Expected `--metric` to be one of the measured columns ({columns}), got {metric!r}.")
    notes = [f"Left out {run.path}, which did not measure {metric}." for run in runs if metric not in run.columns]
    newest: dict[tuple[str, int | None], Run] = {}
    for run in sorted(usable, key=lambda run: run.created):
        newest[run.group, run.seed] = run
    if len(newest) < len(usable):
        notes.append(f"Left out {len(usable) - len(newest)} older run(s) of the same configuration and seed.")
    groups: dict[str, list[Run]] = {}
    for run in newest.values():
        groups.setdefault(run.group, []).append(run)
    labels = _unique_labels([members[-1] for members in groups.values()])
    order = [tuple(sorted(members, key=lambda run: (run.seed is None, run.seed or 0))) for members in groups.values()]
    return [Method(label, members) for label, members in zip(labels, order, strict=True)], notes


def read_metrics(path: Path) -> Columns:
    """Reads a ``metrics.csv``, also one whose last line is being written or was cut off.

    Returns:
        The measured cells. A line with another number of cells than the header is left out, as is a last line without
        its end; of two lines for one round the later counts.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    # A killed process can leave a block of zeros, which the csv module refuses, and half a number at the end.
    lines = [line for line in text[: text.rfind("\n") + 1].splitlines() if "\0" not in line]
    rows = csv.reader(lines)
    header = next(rows, [])
    columns: Columns = {}
    if "round" not in header:
        return columns
    for row in rows:
        cells = dict(zip(header, row, strict=False)) if len(row) == len(header) else {}
        at = _number(cells.pop("round", ""))
        for name, cell in cells.items():
            value = _number(cell)
            if at is not None and at.is_integer() and value is not None:
                columns.setdefault(name, {})[int(at)] = value
    return {name: dict(sorted(values.items())) for name, values in columns.items()}


def _run_folders(folders: Iterable[Path]) -> Iterator[Path]:
    seen = set()
    for folder in folders:
        if not folder.is_dir():
            raise FederatedError(f"Expected a folder of runs to report on, got {folder}, which is none.")
        for at, below, files in os.walk(folder):
            below.sort()
            if "run.json" in files:
                below.clear()
                if (resolved := Path(at).resolve()) not in seen:
                    seen.add(resolved)
                    yield Path(at)


def _read_run(path: Path) -> Run:
    about: dict[str, Any] = json.loads((path / "run.json").read_text(encoding="utf-8"))
    metrics = path / "metrics.csv"
    return Run(
        path=path,
        group=str(about["group"]),
        label=str(about["label"]),
        name=str(about.get("name") or ""),
        seed=about.get("seed"),
        created=_seconds(about.get("created"), path / "run.json"),
        columns=read_metrics(metrics) if metrics.is_file() else {},
    )


def _seconds(created: Any, path: Path) -> float:
    if isinstance(created, (int, float)):
        return float(created)
    if isinstance(created, str):
        return datetime.fromisoformat(created.replace("Z", "+00:00")).timestamp()
    return path.stat().st_mtime


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _unique_labels(runs: Sequence[Run]) -> list[str]:
    labels = [run.label for run in runs]
    for additions in ([run.name for run in runs], [run.group[:8] for run in runs]):
        counts = Counter(labels)
        labels = [
            f"{label} ({addition})" if counts[label] > 1 and addition else label
            for label, addition in zip(labels, additions, strict=True)
        ]
    return labels
