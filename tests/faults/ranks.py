"""One of two processes is killed, stopped or raises: the other one ends, says where, and the run goes on to the bit."""

import contextlib
import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.faults.counts import Counts, Outcome

__all__ = ["TRIALS", "Trial", "run", "try_all"]

TRIALS = 30
SCRIPT = Path(__file__).with_name("rank_trial.py")
HOWS = ("killed", "stopped", "raises")
# Each with how many times it comes by before it hurts: fewer than there are in the round, or in the run.
MOMENTS = {
    "joining": 1, "training": 2, "training alone": 1, "exchanging": 20, "within an exchange": 40, "evaluating": 1,
    "saving": 1,
}  # fmt: skip
# The promise is 15 s after a failure, and after the limit of silence (4 s here, 30 s to join), of which the second is
# for a busy machine.
ENDS_WITHIN_S = 45.0


@dataclass(frozen=True)
class Trial:
    """What happens to which process, and when."""

    how: str
    rank: int
    moment: str
    at: int

    def __str__(self) -> str:
        return f"process {self.rank} {self.how} while {self.moment} ({self.at})"


def draw(trials: int, seed: int) -> list[Trial]:
    """Draws trials: all ways and moments in turn, in a shuffled order."""
    stream = random.Random(seed)
    kinds = [(how, rank, moment) for how in HOWS for rank in (0, 1) for moment in MOMENTS]
    chosen: list[tuple[str, int, str]] = []
    while len(chosen) < trials:
        chosen += stream.sample(kinds, len(kinds))
    return [Trial(*kind, stream.randrange(MOMENTS[kind[2]])) for kind in chosen[:trials]]


def start(folder: Path, asked: dict[str, Any]) -> "subprocess.Popen[bytes]":
    folder.mkdir(exist_ok=True)
    with (folder / "stderr").open("wb") as err:
        words = [sys.executable, str(SCRIPT), json.dumps(asked)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            words, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=err, start_new_session=True
        )


def is_over(pid: int) -> bool:
    """Says whether a process has ended, if nobody has asked for its status yet too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def is_gone(process: "subprocess.Popen[bytes]") -> bool:
    """Says whether no process of a group is left; one that was ended as it began has left no mark of its own."""
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return True
    return False


def hurt(trial: Trial, folder: Path) -> tuple[Outcome, str] | None:
    """Carries out a trial; returns what is wrong with how the other process ended, if anything is."""
    process = start(folder, {**vars(trial), "folder": str(folder)})
    mark, limit = folder / "hurt", time.monotonic() + 120
    while not mark.exists() and time.monotonic() < limit and process.poll() is None:
        time.sleep(0.1)
    since, other = time.monotonic(), folder / f"pid{1 - trial.rank}"
    ended = False
    while time.monotonic() - since < ENDS_WITHIN_S and not ended:
        ended = is_over(int(other.read_text())) if other.exists() else process.poll() is not None and is_gone(process)
        if trial.rank == 0 and trial.how == "killed":
            process.poll()
        time.sleep(0.1)
    seconds = time.monotonic() - since
    with_signal = trial.rank == 0 and trial.how != "raises"
    status = None if with_signal or not ended else process.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    said = (folder / "stderr").read_text(errors="replace")
    if not mark.exists():
        return "wrong success", f"nothing was hurt: {said[-300:]}"
    if not ended:
        return "hang", f"the other one goes on after {seconds:.0f} s: {said[-300:]}"
    if status == 0:
        return "wrong success", said[-300:]
    return judge(trial, said)


def judge(trial: Trial, said: str) -> tuple[Outcome, str] | None:
    """Judges what was said: which process, in which round, and no traceback but that of the error on purpose."""
    raised = trial.how == "raises"
    if said.count("Traceback (most recent call last)") > raised:
        return "traceback", said[-2000:]
    joining = trial.moment == "joining"
    who = f"Process {trial.rank} ended" if raised else f"process {trial.rank}"
    if joining and trial.how != "killed":
        who = "raised on purpose" if raised else "all processes to join the run within"
    if who not in said or not (joining or "in round " in said):
        return "lost", f"who and where is not said: {said[-600:]}"
    return None


def result(folder: Path) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Returns rows, without times, and the model of a finished run."""
    (path,) = (folder / "run").glob("version_*/metrics.csv")
    with path.open() as file:
        rows = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in csv.DictReader(file)]
    return rows, torch.load(path.parent / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def same(folder: Path, reference: Path) -> bool:
    """Says whether two runs have the same rows and the same model, bit for bit."""
    try:
        (rows, model), (others, other) = result(folder), result(reference)
    except (ValueError, OSError):
        return False
    return rows == others and all(torch.equal(value, other[name]) for name, value in model.items())


def try_all(trials: list[Trial], folder: Path) -> Counts:
    """Carries out trials, then lets all their runs go on in two processes, and compares them with an unhurt one."""
    counts, places = Counts(), [folder / f"trial{number}" for number in range(len(trials))]
    found = [hurt(trial, place) for trial, place in zip(trials, places, strict=True)]
    reference = folder / "reference"
    going_on = start(folder / "resumed", {"resume": [str(reference), *map(str, places)]})
    try:
        going_on.wait(120 + 20 * len(trials))
    finally:
        if going_on.poll() is None:
            os.killpg(going_on.pid, signal.SIGKILL)
    for trial, place, wrong in zip(trials, places, found, strict=True):
        outcome, what = wrong or (("right", "") if same(place, reference) else ("lost", "resumed otherwise"))
        counts.note(outcome, f"{trial}: {what}")
    return counts


def run(trials: int, seed: int) -> Counts:
    """Runs the campaign."""
    with tempfile.TemporaryDirectory() as folder:
        return try_all(draw(trials, seed), Path(folder))
