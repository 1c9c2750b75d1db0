"""What the runs of a study have come to, from their folders."""

import json
from collections.abc import Sequence
from pathlib import Path

from lightning_fed.errors import FederatedError
from lightning_fed.lab.report.budgets import X_SUMS, columns_of
from lightning_fed.lab.runner.record import done_run, read_run
from lightning_fed.lab.runner.tuning import groups_of, with_choices
from lightning_fed.lab.studies.cells import Cell, cells_of
from lightning_fed.lab.studies.results import StudyResults, StudyRun, Trial
from lightning_fed.lab.studies.study import Report, Study
from lightning_fed.runs.statistics import run_statistic

__all__ = ["collect"]


def collect(study: Study, profile: str, root: Path) -> tuple[StudyResults, list[Cell]]:
    """Reads the runs of a study in the size of a profile that are done, with the columns that are reported.

    Returns:
        What they came to, and the runs that are missing.
    """
    cells = cells_of(study)
    groups = groups_of(study, cells, root, writes=False)
    tuned, undecided = with_choices(study, cells, groups)
    runs = {cell.folder: run for cell in tuned if (run := _read(root, cell, study.report)) is not None}
    missing = [cell for cell in tuned if cell.folder not in runs]
    # A sampler may propose the same options twice, which are one run.
    tried = {cell.folder: cell for group in groups for attempt in group.asked() for cell in attempt.cells}
    trials = [trial for cell in tried.values() if (trial := _trial(root, cell, study)) is not None]
    if runs and (wrong := _not_measured(list(runs.values()), study.report)):
        columns = ", ".join(
            sorted({"round", *X_SUMS, *(name for cell in tuned for name in read_run(root, cell) or ())})
        )
        raise FederatedError(f"Expected {wrong[0]} to be a column that was measured ({columns}), got {wrong[1]}.")
    return StudyResults(study.name, profile, tuple(runs.values()), tuple(trials)), [*missing, *undecided]


def _not_measured(runs: Sequence[StudyRun], report: Report) -> tuple[str, str] | None:
    """Returns what the report names that no run has measured, and under which key; None if there is nothing."""
    kept = {name for run in runs for name in run.curves}
    if not kept & {*report.metric}:
        return "`report.metric`", ", ".join(report.metric)
    if not kept.issuperset(columns_of(report.x)):
        return "`report.x`", report.x
    return None


def _read(root: Path, cell: Cell, report: Report) -> StudyRun | None:
    run, columns = done_run(root, cell), read_run(root, cell)
    if run is None or columns is None:
        return None
    last = max((at for column in columns.values() for at in column), default=0)
    kept = [name for name in (*report.metric, *columns_of(report.x)) if name in columns]
    curves = {name: columns[name] for name in kept}
    return StudyRun(dict(cell.axes), cell.seed, run.fingerprint, last, _as_words(cell), curves)


def _trial(root: Path, cell: Cell, study: Study) -> Trial | None:
    """Reads a run of the tuning: what decides, and beside it the best on the test set, by which nothing is chosen."""
    columns, tune = read_run(root, cell), study.tune
    if columns is None:
        return None
    wanted = {f"{tune.metric} {tune.statistic}": (tune.metric, tune.statistic)}
    wanted |= {f"{name} best, not to choose by": (name, "best") for name in study.report.metric}
    values = {
        title: run_statistic(columns[name], statistic, name)
        for title, (name, statistic) in wanted.items()
        if name in columns
    }
    return Trial(dict(cell.axes), cell.seed, _as_words(cell), values)


def _as_words(cell: Cell) -> dict[str, str]:
    return {option: value if isinstance(value, str) else json.dumps(value) for option, value in cell.options.items()}
