"""Files of a sent study, of its runs and of data damaged: it is read right, or a sentence says what is left out."""

import json
import os
import random
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np

from lightning_fed.data.readers.array_files import ArrayFile
from lightning_fed.errors import FederatedError
from lightning_fed.lab.report.page import run_options
from lightning_fed.lab.report.runs import load_runs
from lightning_fed.lab.runner import record
from lightning_fed.lab.runner.tuning import groups_of, tune
from lightning_fed.lab.studies.cells import cells_of
from lightning_fed.lab.studies.study import Study, Tune
from tests.faults import damage
from tests.faults.config_trials import bomb
from tests.faults.counts import Counts, Outcome
from tests.lab.runner.test_tuning import trainer

TRIALS = 500
_LIMIT = 20
_STUDY = Study("T", "t", tune=Tune(parameters={"lr": [0.1, 0.2, 1.0]}, statistic="final"))
_VALUES = [0.1, 0.2, 1.0]


def become_aliases(path: Path, chance: random.Random) -> None:
    path.write_bytes(bomb(chance, path.read_bytes()))


def nest(path: Path, chance: random.Random) -> None:
    path.write_text(chance.choice(("[" * 100_000, '{"a":' * 100_000, "9" * 5000, '{"rounds": ' + "9" * 5000 + "}")))


TARGETS: dict[str, tuple[Callable[[Path, random.Random], None], ...]] = {
    "t/tuning.log": (*damage.ANY, damage.lose_a_line, damage.half_a_line, nest),
    "t/**/done.json": (*damage.ANY, damage.lose_a_line, nest),
    "t/**/run.json": (*damage.ANY, damage.lose_a_line, nest),
    "t/**/config.yaml": (*damage.ANY, become_aliases, become_aliases, become_aliases, nest),
    "t/**/metrics.csv": (damage.delete, damage.become_a_pipe, damage.become_a_device, damage.half_a_line),
    "data/*": (damage.become_a_folder, damage.become_a_pipe, damage.become_a_device, damage.become_noise, damage.cut),
}  # fmt: skip


def _train(root: Path) -> float | None:
    """Tunes what is not done, and returns the rate that is chosen; the largest one is best."""
    record._values_of.cache_clear()
    (group,) = groups_of(_STUDY, cells_of(_STUDY), root / "t")
    tune([group], trainer(root / "t", lambda cell: float(cell.options["lr"])), 1)
    chosen = group.choice()
    return None if chosen is None else chosen.options["lr"]


def make(root: Path) -> None:
    """Makes a tuned study, with a configuration beside each run, and files of data."""
    assert _train(root) == _VALUES[-1]
    for run in (root / "t").rglob("run.json"):
        run.with_name("config.yaml").write_text("model: {init_args: {lr: 0.1}}\nclient: null\n")
    (root / "data").mkdir()
    np.savez(root / "data" / "train.npz", x=np.zeros((4, 2)), y=np.zeros(4))
    np.save(root / "data" / "x.npy", np.zeros((4, 2)))


def _read(root: Path) -> list[float]:
    """Reads the runs as a report does, and the data; returns the last values that are told."""
    for path in sorted((root / "data").iterdir()):
        if path.suffix in (".npz", ".npy"):
            ArrayFile(path, "--data.path")
    try:
        runs, _ = load_runs([root / "t"])
    except FederatedError as error:
        if "found no run" not in str(error):
            raise
        return []
    for run in runs:
        json.dumps(run_options(run.path))
    return [list(run.columns["val/acc"].values())[-1] for run in runs if "val/acc" in run.columns]


@contextmanager
def _limited() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("hang")

    former = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


def trial(root: Path, chance: random.Random) -> tuple[Outcome, str]:
    """Damages a file, reads all, and goes on with the study."""
    target = chance.choice(list(TARGETS))
    path, harm = chance.choice(sorted(root.glob(target))), chance.choice(TARGETS[target])
    harm(path, chance)
    said = f"{harm.__name__} {path.relative_to(root)}"
    told = []
    for act in (_read, _train):
        try:
            with _limited(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = act(root)
        except FederatedError as error:
            if "\n" in str(error) or not str(error).endswith("."):
                return "traceback", f"{said}: {error}"
            told.append(str(error))
            continue
        except TimeoutError:
            return "hang", said
        except BaseException as error:
            return "traceback", f"{said}: {type(error).__name__}: {str(error)[:200]}"
        if act is _train and found != _VALUES[-1]:
            return "wrong success", f"{said}: {found} chosen"
        if act is _read and path.name != "metrics.csv" and not set(found) <= set(_VALUES):
            return "wrong success", f"{said}: {found} read"
    return "right", f"{said}: {' and '.join(told)}"


def run(trials: int, seed: int) -> Counts:
    """Runs the campaign."""
    counts, before = Counts(), Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        try:
            make(Path("made"))
            for number in range(trials):
                shutil.copytree("made", f"{number}")
                outcome, said = trial(Path(f"{number}"), random.Random(f"{seed} {number}"))
                counts.note(outcome, f"seed {seed}, trial {number}: {said}")
                shutil.rmtree(f"{number}")
        finally:
            os.chdir(before)
    return counts
