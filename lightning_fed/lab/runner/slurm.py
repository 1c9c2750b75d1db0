"""A study on a SLURM cluster: each task of one job array runs the study command on a share of the runs."""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from lightning_fed.cli.exits import mistakes_in_one_sentence
from lightning_fed.errors import FederatedError, expect, import_extra, is_count
from lightning_fed.lab.common import expect_known
from lightning_fed.lab.report.summary import counted
from lightning_fed.lab.runner.pool import Outcome
from lightning_fed.lab.studies.cells import Cell

if TYPE_CHECKING:
    import submitit

__all__ = ["TASK_LOGS", "Task", "make_executor", "train_in_tasks"]

TASK_LOGS = "slurm/*_log.out"
"""The files in a study's folder with the output of its tasks."""

_LOOK_S, _LOOKS = 10.0, 6
_EXAMPLE = "as in `--slurm time=240,partition=gpu`"
_LINES = ("setup", "teardown", "srun_args")
# Fixed here, as a second process would train the same share again.
_FIXED = {
    "additional_parameters", "job_name", "nodes", "ntasks_per_node", "num_gpus", "stderr_to_stdout", "use_srun"
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A task of the array: the study command on a share of the runs.

    SLURM starts it again if its time was too short or another job preempted it.
    """

    start: Callable[[], int]

    def __call__(self) -> int:
        """Trains the share; if this fails, SLURM shows the task as failed."""
        for name in ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"):
            os.environ.pop(name, None)  # with these Lightning would expect several processes
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # inherited by the server that forks the runs
        with mistakes_in_one_sentence():
            if code := self.start():
                raise SystemExit(code)
        return 0

    def checkpoint(self) -> "submitit.helpers.DelayedSubmission":
        """Returns the task that follows when the time has run out: the same one, from the last checkpoints."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def make_executor(root: Path, given: str) -> "submitit.SlurmExecutor":
    """Makes the executor that submits to SLURM, from options with submitit's names, such as ``time=240,mem=8GB``."""
    module = import_extra("submitit", "study", "`--launcher slurm`")
    if missing := [name for name in ("sbatch", "srun", "squeue") if shutil.which(name) is None]:
        raise FederatedError(f"Expected a machine that can submit jobs to SLURM, but it has no {missing[0]}.")
    for place, text in (("--slurm", given), ("--output", str(root.absolute()))):
        # A second line would become part of the script.
        expect(text.isprintable(), f"Expected `{place}` on one line, without control characters, got {text!r}.")
    options = _options_of(given)
    known = module.SlurmExecutor._valid_parameters() - _FIXED
    expect_known("--slurm", options, sorted(known), "keys of submitit")
    minutes = options.get("time")
    expect(
        is_count(minutes), f"Expected `--slurm` to say how many minutes a task may take, {_EXAMPLE}, got {minutes!r}."
    )
    executor: submitit.SlurmExecutor = module.SlurmExecutor(root / Path(TASK_LOGS).parent)
    place = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:8]
    name = re.sub(r"[^\w.-]", "_", root.name)
    executor.update_parameters(**options, job_name=f"{name}-{place}", stderr_to_stdout=True)
    return executor


def _options_of(given: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for word in re.split(r",(?=\w+=)", given) if given else ():
        name, equals, value = word.partition("=")
        expect(equals, f"Expected `--slurm` as KEY=VALUE,..., {_EXAMPLE}, got {word!r}.")
        if name in _LINES:
            options.setdefault(name, []).append(value)
        else:
            expect(name not in options, f"Expected `--slurm` to give each key once, got {name!r} twice.")
            options[name] = int(value) if value.isdecimal() else value == "true" or value
    return options


def train_in_tasks(
    executor: "submitit.SlurmExecutor", tasks: Sequence[Task], plan: Callable[[], tuple[list[Cell], list[Cell]]]
) -> Outcome:
    """Submits tasks as one job array, unless tasks of an earlier start are in the queue, and waits for their end.

    ``plan`` returns all runs, and those that are not done.

    Raises:
        SystemExit: After Ctrl-C, which only ends the waiting.
    """
    if not tasks:
        return Outcome()
    name = executor.parameters["job_name"]
    try:
        if states := _states(name):
            print(f"No new tasks are submitted, as job {name} already has {states.total()} in the queue.")
        else:
            executor.submit_array(tasks)
            print(f"Submitted {counted(len(tasks), 'task')} of job {name}; after Ctrl-C they stay in the queue.")
    except RuntimeError as error:
        raise FederatedError(f"Expected SLURM to accept the job, but it says: {' '.join(str(error).split())}") from None
    try:
        return Outcome(_wait(name, plan))
    except KeyboardInterrupt:
        print(f"\nThe tasks go on: start the same command to wait again, or `scancel --name {name}` to end them.")
        raise SystemExit(128 + signal.SIGINT) from None


def _wait(name: str, plan: Callable[[], tuple[list[Cell], list[Cell]]]) -> list[Cell]:
    """Waits with a progress bar until no task is in the queue, and returns the runs that are not done."""
    states, left = Counter(submitted=1), _LOOKS
    with tqdm(desc="Runs", unit="run", disable=not sys.stderr.isatty()) as bar:
        while True:
            planned, missing = plan()
            bar.n, bar.total = len(planned) - len(missing), len(planned)
            bar.set_postfix(states)
            with suppress(FederatedError):  # SLURM may be busy
                states = _states(name)
            left = _LOOKS if states else left - 1  # files of other machines may appear late
            if not states and (not left or not missing):
                return missing
            time.sleep(_LOOK_S)


def _states(name: str) -> Counter[str]:
    """Counts the tasks of a job in the queue by their state."""
    command = ["squeue", "--me", "--noheader", "--array", f"--name={name}", "--format=%T"]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        raise FederatedError(f"Expected SLURM to answer `squeue`, but it says: {' '.join(answer.stderr.split())}")
    return Counter(answer.stdout.lower().split())
