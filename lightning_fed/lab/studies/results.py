"""The results of a study as CSV files: a row for each run, for each evaluated round, and for each trial."""

import csv
import gzip
import io
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from lightning_fed.core.files import read_regular, write_atomically
from lightning_fed.errors import FederatedError, expect
from lightning_fed.lab.common import csv_text, no_apostrophe
from lightning_fed.lab.report.runs import MeasuredRun
from lightning_fed.runs.statistics import LAST, Goal, goals_in, known_goal, number_in, run_statistic

__all__ = [
    "AT_EQUAL", "BESIDE", "RESERVED", "StudyResults", "StudyRun", "TO_TARGET", "Trial", "is_lost", "read_results",
    "table_file", "value_of_run", "write_results",
]  # fmt: skip

RESERVED = ("study", "profile", "seed", "fingerprint", "rounds", "round", "metric", "statistic", "stage")
"""Names that an axis cannot have, as tables have columns with these names."""

AT_EQUAL = "at equal "
"""The prefix of a statistic that is taken at equal loss; the name of the loss follows."""

TO_TARGET = " to "
"""Stands in a statistic that is a cost, between its column and the target: ``gradients to 0.8``."""

BESIDE = " best, not to choose by"
"""The end of the name of a trial's value that is shown but does not decide."""

_NAMED = ("study", "profile")
_CHOSEN, _VALUE, _GOAL = "chosen ", "value ", "goal of "
_STATISTICS = ("best", "final", f"last {LAST}")

_Row = Mapping[str, str]
_T = TypeVar("_T")


@dataclass(frozen=True)
class StudyRun:
    """One run of a study."""

    axes: dict[str, str]  # a value for each axis, in the order of the study's file
    seed: int
    fingerprint: str  # that of its run folder
    rounds: int  # the last evaluated round
    chosen: dict[str, str] = field(default_factory=dict)  # tuned options, as on the command line
    curves: dict[str, dict[int, float]] = field(default_factory=dict)  # by metric and evaluated round, in order
    goals: dict[str, Goal] = field(default_factory=dict)  # of metrics whose names do not say them
    created: float = field(default=0.0, compare=False)  # seconds since the epoch; 0 if only tables exist
    read: dict[tuple[str, str], float] = field(default_factory=dict, compare=False)
    """By metric and statistic, what its curve alone does not give, such as the value at equal loss."""
    folder: MeasuredRun | None = field(default=None, compare=False)  # its run folder, if it is to be shown too

    @property
    def measured(self) -> MeasuredRun:
        """Its run folder with all columns, or else only the curves of the tables."""
        name = self.fingerprint
        return self.folder or MeasuredRun(Path(name), name, "", "", "", self.seed, "", 0.0, self.curves)

    def shown(self, metrics: Iterable[str]) -> list[list[tuple[int, str]]]:
        """Returns the rounds and values of some metrics, as tables have them."""
        return [[(at, _as_text(value)) for at, value in self.curves.get(name, {}).items()] for name in metrics]


@dataclass(frozen=True)
class Trial:
    """One run of the tuning; its values are the deciding validation metric and the reported metrics."""

    axes: dict[str, str]
    seed: int
    options: dict[str, str]
    values: dict[str, float]
    stage: int = 0  # stage of the tuning, from 1; 0 without stages


@dataclass(frozen=True)
class StudyResults:
    """The data for a study's tables and pictures: its runs, in the order of axes and seeds, and its trials."""

    name: str
    profile: str
    runs: tuple[StudyRun, ...]
    trials: tuple[Trial, ...] = ()


def is_lost(curve: Mapping[int, float]) -> bool:
    """Tells whether a metric of a run ends with NaN, because the run diverged."""
    return bool(curve) and math.isnan(curve[max(curve)])


def value_of_run(curve: Mapping[int, float], statistic: str, metric: str, goal: Goal | None = None) -> float:
    """Returns a statistic of one run; NaN for a diverged run, whatever it had reached before."""
    return math.nan if is_lost(curve) else run_statistic(curve, statistic, metric, goal)


def table_file(folder: Path, name: str) -> Path:
    """Returns the file of a table of results: ``NAME.csv.gz`` where it is there, else ``NAME.csv``."""
    packed = folder / f"{name}.csv.gz"
    return packed if packed.is_file() else folder / f"{name}.csv"


def write_results(results: StudyResults, folder: Path) -> None:
    """Writes ``results.csv``, ``curves.csv`` and, after a tuning, ``tuning.csv``.

    Numbers have seven digits, as in single precision, so reading and writing the files again changes nothing. A table
    that is a ``.csv.gz`` already stays one.
    """
    expect(
        results.runs,
        f"Expected finished runs of the study {results.name} (profile {results.profile}), found none: run "
        "`lightning-fed study` with the same file, `--profile` and `--output` first.",
    )
    _write(table_file(folder, "results"), results.runs, _run_rows(results))
    _write(table_file(folder, "curves"), results.runs, _curve_rows(results.runs))
    if results.trials:
        _write(table_file(folder, "tuning"), results.trials, _trial_rows(results.trials))
    else:
        for name in ("tuning.csv", "tuning.csv.gz"):
            (folder / name).unlink(missing_ok=True)


def read_results(folder: Path) -> StudyResults:
    """Reads the files of ``write_results``."""
    results_csv, curves_csv, tuning = (table_file(folder, name) for name in ("results", "curves", "tuning"))
    rows = _read(results_csv, (*_NAMED, "seed", "fingerprint", "rounds"), _run)
    curves: dict[tuple[str, ...], dict[str, dict[int, float]]] = {}
    for key, at, values in _read(curves_csv, ("seed", "round"), _point):
        for metric, value in values.items():
            curves.setdefault(key, {}).setdefault(metric, {})[at] = value
    named, keys = {name for name, _, _ in rows}, [_key(run.axes, run.seed) for _, _, run in rows]
    runs = tuple(replace(run, curves=curves.get(key, {})) for key, (_, _, run) in zip(keys, rows, strict=True))
    differ = any(map(_differs, runs, (row for _, row, _ in rows)))
    for wrong, file, what in (
        (len(named) != 1, results_csv, "all runs are of one study and profile"),
        (len({*keys}) < len(keys), results_csv, "no run stands there twice"),
        (not curves.keys() <= {*keys}, curves_csv, "each of its runs is in results.csv"),
        (differ, curves_csv, "it agrees with the results.csv beside it"),
    ):
        if wrong:
            raise _damaged(file, f"not so that {what}")
    trials = tuple(_read(tuning, ("seed",), _trial)) if tuning.is_file() else ()
    return StudyResults(*named.pop(), runs, trials)


def _run_rows(results: StudyResults) -> Iterator[dict[str, str]]:
    for run in results.runs:
        row = {"study": results.name, "profile": results.profile, **run.axes, "seed": str(run.seed)}
        row |= {"fingerprint": run.fingerprint, "rounds": str(run.rounds)}
        row |= {_CHOSEN + option: value for option, value in run.chosen.items()}
        row |= {_GOAL + metric: goal for metric, goal in run.goals.items()}
        yield row | _figures(run)


def _figures(run: StudyRun) -> dict[str, str]:
    """Returns the statistics of a run, for people and to check the curves by; no ``best`` if nobody knows the goal."""
    cells = dict[str, str]()
    for metric, curve in run.curves.items():
        written = {at: float(_as_text(value)) for at, value in curve.items()}
        goal = known_goal(metric, run.goals.get(metric))
        known = [name for name in _STATISTICS if goal or name != "best"]
        cells |= {f"{metric} {name}": _as_text(value_of_run(written, name, metric, goal)) for name in known}
    return cells


def _differs(run: StudyRun, row: _Row) -> bool:
    """Tells whether a run's curves have later rounds, or other statistics, than its row says."""
    figures, last = _figures(run), max((at for curve in run.curves.values() for at in curve), default=0)
    lost = any(row[name] and name.endswith(" final") for name in row.keys() - figures.keys() - run.axes.keys())
    return lost or last > run.rounds or any(row.get(name, cell) != cell for name, cell in figures.items())


def _curve_rows(runs: Iterable[StudyRun]) -> Iterator[dict[str, str]]:
    for run in runs:
        for at in sorted({at for curve in run.curves.values() for at in curve}):
            row = run.axes | {"seed": str(run.seed), "round": str(at)}
            yield row | {metric: _as_text(curve[at]) for metric, curve in run.curves.items() if at in curve}


def _trial_rows(trials: Iterable[Trial]) -> Iterator[dict[str, str]]:
    for trial in trials:
        options = {_CHOSEN + option: value for option, value in trial.options.items()}
        values = {_VALUE + name: _as_text(value) for name, value in trial.values.items()}
        stage = {"stage": str(trial.stage)} if trial.stage else {}
        yield trial.axes | {"seed": str(trial.seed)} | stage | options | values


def _as_text(value: float) -> str:
    """Writes a number for the tables, with the digits of single precision."""
    return f"{value:.7g}"


def _write(path: Path, runs: Iterable[StudyRun | Trial], rows: Iterable[_Row]) -> None:
    rows = list(rows)
    axes = dict.fromkeys(name for run in runs for name in run.axes)
    # Options that only some runs have also come before the measured columns.
    others = dict.fromkeys(name for row in rows for name in row if name not in _NAMED and name not in axes)
    ordered = sorted(others, key=lambda name: 0 if name in RESERVED else 1 if name.startswith(_CHOSEN) else 2)
    named = [name for name in _NAMED if name in rows[0]]
    header = [*named, *axes, *ordered]
    lines = [header, *([row.get(name, "") for name in header] for row in rows)]
    content = csv_text(lines, end="\n").encode()
    # Without the time of writing, so that the same rows are the same bytes.
    write_atomically(path, gzip.compress(content, mtime=0) if path.suffix == ".gz" else content, "--output")


def _read(path: Path, expected: Sequence[str], make: Callable[[_Row], _T]) -> list[_T]:
    """Reads complete rows; empty cells are left out."""
    try:
        content = read_regular(path)
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise FederatedError(f"Expected the results of a study in {path}, but it cannot be read ({error}).") from error
    try:
        lines = csv.reader(io.StringIO(text, newline=""), strict=True)
        header, *rows = ([no_apostrophe(cell) for cell in line] for line in lines)
        if missing := [name for name in expected if name not in header]:
            raise ValueError(f"not so that there are columns {', '.join(missing)}")
        if not text.endswith("\n") or any(len(row) != len(header) for row in rows):
            raise ValueError("not so that all rows are whole")
        return [make(dict(zip(header, row, strict=True))) for row in rows]
    except (ValueError, csv.Error) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, why: object) -> FederatedError:
    return FederatedError(f"Expected {path} as `lightning-fed report --study` writes it, but it is damaged ({why}).")


def _axes(row: _Row) -> dict[str, str]:
    names = [name for name in row if name not in _NAMED]
    return {name: row[name] for name in names[: names.index("seed")] if row[name]}


def _below(row: _Row, prefix: str) -> dict[str, str]:
    return {name.removeprefix(prefix): cell for name, cell in row.items() if name.startswith(prefix) and cell}


def _key(axes: Mapping[str, str], seed: int) -> tuple[str, ...]:
    return (*axes.values(), str(seed))


def _run(row: _Row) -> tuple[tuple[str, str], _Row, StudyRun]:
    run = StudyRun(_axes(row), int(row["seed"]), row["fingerprint"], int(row["rounds"]), _below(row, _CHOSEN))
    return (row["study"], row["profile"]), row, replace(run, goals=goals_in(_below(row, _GOAL)))


def _point(row: _Row) -> tuple[tuple[str, ...], int, dict[str, float]]:
    metrics = list(row)[list(row).index("round") + 1 :]
    values = {metric: number_in(row[metric]) for metric in metrics if row[metric]}
    return _key(_axes(row), int(row["seed"])), int(row["round"]), values


def _trial(row: _Row) -> Trial:
    values = {name: number_in(cell) for name, cell in _below(row, _VALUE).items()}
    return Trial(_axes(row), int(row["seed"]), _below(row, _CHOSEN), values, int(row.get("stage") or 0))
