"""How long the runs that are missing will take, by the seconds per round of those that are done."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import yaml

from lightning_fed.cli.configs_command import find_config
from lightning_fed.lab.report.load import read_metrics
from lightning_fed.lab.runner.pool import Pool
from lightning_fed.lab.runner.record import LOG, Guard, done_run
from lightning_fed.lab.studies.cells import Cell
from lightning_fed.runs.folder import read_rows

__all__ = ["rounds_of", "time_needed"]

_TRIED, _BY_DEFAULT = 3, 100
_NAMES = ("max_rounds", "max_epochs")


def time_needed(root: Path, cells: Sequence[Cell], missing: Sequence[Cell], jobs: int, guard: Guard) -> str:
    """Says in a sentence how many rounds are missing, and about how long they take.

    Where no run is done, a few rounds of the first one are timed, in a folder that is removed.
    """
    if not missing:
        return "Nothing is missing."
    pairs = [(rounds_of(cell), _trained(root / cell.folder)) for cell in missing]
    # Where the newest run in a folder has all rounds it is another one, and all are still needed.
    rounds = sum(most - trained if trained < most else most for most, trained in pairs)
    each = _seconds(root, cells)
    if not each:
        print(f"Timing {_TRIED} rounds of {missing[0].label}.")
        with TemporaryDirectory() as folder:
            words = (*missing[0].words, f"--trainer.max_rounds={_TRIED}")
            short = replace(missing[0], words=words, watch=None)  # a run that is only timed is none of a trial
            Pool(Path(folder), 1, guard, say=lambda words: None).train([short])
            each = _seconds(Path(folder), [short])
            log = Path(folder) / short.folder / LOG
            said = (log.read_text() if log.exists() else "").strip().splitlines() or ["it printed nothing"]
    needed = f"{len(missing)} runs are missing, {rounds} rounds"
    if not each:
        return f"{needed}; how long they take is not known, as the first run failed: {said[-1]}"
    left = timedelta(seconds=round(rounds * fmean(each) / min(jobs, len(missing))))
    return (
        f"{needed}: about {left} (h:mm:ss) at {jobs} runs at a time and {fmean(each):.3g} s for each round, and some "
        "seconds to start each."
    )


def _seconds(root: Path, cells: Sequence[Cell]) -> list[float]:
    """Returns the mean seconds of a round for each run that is done."""
    found = (done_run(root, cell) for cell in cells)
    columns = (read_metrics(run.metrics).get("time/round", {}) for run in found if run is not None)
    return [fmean(column.values()) for column in columns if column]


def _trained(folder: Path) -> int:
    """Returns the rounds that the newest run in a folder has trained."""
    tables = sorted(folder.glob("version_*/metrics.csv"), key=lambda path: path.stat().st_mtime)
    return max((int(row["round"]) for row in read_rows(tables[-1])), default=0) if tables else 0


def rounds_of(cell: Cell) -> int:
    """Returns the rounds that a run is to have, as its words say."""
    rounds, words = _BY_DEFAULT, iter(cell.words)
    for word in words:
        option, _, value = word.partition("=")
        given: dict[str, object] = {}
        if word == "--config":
            given = _trainer_of(next(words))
        elif option == "--trainer":
            given = yaml.safe_load(value) or {}
        elif (name := option.removeprefix("--trainer.")) in _NAMES:
            given = {name: yaml.safe_load(value)}
        rounds = next((int(str(given[name])) for name in _NAMES if name in given), rounds)
    return rounds


@cache
def _trainer_of(name: str) -> dict[str, object]:
    """Returns what a configuration says of the trainer; read once, as a study may have 100,000 runs of it."""
    config = yaml.safe_load(Path(find_config(name)).read_text()) or {}
    return config.get("trainer") or {}
