"""What the runs of a study have come to, from their folders."""

import json
from pathlib import Path

from lightning_fed.cli.study.record import done_run
from lightning_fed.runs.report.budgets import X_SUMS
from lightning_fed.runs.report.load import read_metrics
from lightning_fed.runs.studies.cells import Cell, cells_of
from lightning_fed.runs.studies.results import StudyResults, StudyRun
from lightning_fed.runs.studies.study import Report, Study

__all__ = ["collect"]


def collect(study: Study, profile: str, root: Path) -> tuple[StudyResults, list[Cell]]:
    """Reads the runs that are done, with the columns that are reported.

    Args:
        study: The study, in the size of the profile.
        profile: Its name.
        root: The folder of its runs.

    Returns:
        What they came to, and the runs that are missing.
    """
    cells = cells_of(study)
    runs = {cell.folder: run for cell in cells if (run := _read(root, cell, study.report)) is not None}
    missing = [cell for cell in cells if cell.folder not in runs]
    return StudyResults(study.name, profile, tuple(runs.values())), missing


def _read(root: Path, cell: Cell, report: Report) -> StudyRun | None:
    run = done_run(root, cell)
    if run is None:
        return None
    columns = read_metrics(run.metrics)
    last = max((at for column in columns.values() for at in column), default=0)
    kept = [name for name in (*report.metric, *X_SUMS.get(report.x, (report.x,))) if name in columns]
    curves = {name: columns[name] for name in kept}
    return StudyRun(dict(cell.axes), cell.seed, run.fingerprint, last, _chosen(cell), curves)


def _chosen(cell: Cell) -> dict[str, str]:
    return {option: value if isinstance(value, str) else json.dumps(value) for option, value in cell.options.items()}
