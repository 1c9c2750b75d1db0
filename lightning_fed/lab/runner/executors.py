"""Trains several runs of a study at a time: in processes, or on a SLURM cluster."""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from lightning_fed.cli.exits import mistakes_in_one_sentence
from lightning_fed.errors import FederatedError, expect, import_extra, is_count
from lightning_fed.lab.common import expect_known
from lightning_fed.lab.report.runs import counted
from lightning_fed.lab.runner.record import DIVERGED, HELD, LOG, PRUNED, Guard, done_run, rounds_trained
from lightning_fed.lab.studies.cells import Cell
from lightning_fed.runs.lock import RunLock

if TYPE_CHECKING:
    import submitit

__all__ = ["Outcome", "Pool", "TASK_LOGS", "Task", "make_executor", "seconds_left", "train_in_tasks"]

_LOOK_S = 1.0
_EARLY = "ended early, as other trials are better"
_WORKER = "lightning_fed.lab.runner.worker"

TASK_LOGS = "slurm/*_log.out"
"""The files in a study's folder with the output of its tasks."""

_ASK_S, _ASKS = 10.0, 6
_EXAMPLE = "as in `--slurm time=240,partition=gpu`"
_LINES = ("setup", "teardown", "srun_args")
# Fixed here, as a second process would train the same share again.
_FIXED = {
    "additional_parameters", "job_name", "nodes", "ntasks_per_node", "num_gpus", "stderr_to_stdout", "use_srun"
}  # fmt: skip


@dataclass
class Outcome:
    """How a set of runs ended: the failed runs, and the signal that stopped the program, None for none."""

    failed: list[Cell] = field(default_factory=list)
    signum: int | None = None


class Pool:
    """Trains runs in processes of one thread each, forked from a process that has loaded all imports."""

    def __init__(self, root: Path, jobs: int, guard: Guard, say: Callable[[str], object] = tqdm.write) -> None:
        self._root, self._jobs, self._guard, self._say = root, jobs, guard, say
        os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it when it is loaded
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload([_WORKER])
        self._running: dict[BaseProcess, tuple[Cell, float]] = {}
        self._outcome, self._before, self._took = Outcome(), 0, list[float]()
        self._ended: Callable[[Cell, bool], object] = lambda cell, early: None

    def mistake(self, cells: Sequence[Cell]) -> str:
        """Returns the first mistake in the options of some runs, empty if there is none."""
        with ProcessPoolExecutor(1, self._context, initializer=_work, initargs=("end_with_parent",)) as reader:
            try:
                return str(reader.submit(_work, "mistake_in", cells, self._guard).result())
            except BrokenProcessPool:
                return "The process that checks the options of the runs has ended."

    def train(self, cells: Sequence[Cell], ended: Callable[[Cell, bool], object] = lambda cell, early: None) -> Outcome:
        """Trains the runs that are not done, and waits for runs that other programs train.

        After each run it calls ``ended`` with the run and whether it was ended early.
        """
        self._outcome, self._ended, self._took = Outcome(), ended, []
        open_runs = [cell for cell in cells if done_run(self._root, cell) is None]
        self._before = len(cells) - len(open_runs)
        waiting, held = deque(open_runs), list[Cell]()
        bar = tqdm(total=len(cells), initial=self._before, desc="Runs", unit="run",
                   disable=not sys.stderr.isatty())  # fmt: skip
        with self._signals(), bar:
            while self._running or ((waiting or held) and self._outcome.signum is None):
                self._start(waiting)
                if not bar.disable:
                    bar.set_postfix_str(self._at(len(held)))
                wait([process.sentinel for process in self._running], _LOOK_S)
                for process in [process for process in self._running if not process.is_alive()]:
                    self._end(process, held, bar)
                if not waiting:  # only now check the runs of other programs again
                    waiting.extend(cell for cell in held if _is_free(self._root / cell.folder))
                    held = [cell for cell in held if cell not in waiting]
        return self._outcome

    def _start(self, waiting: "deque[Cell]") -> None:
        while waiting and len(self._running) < self._jobs and self._outcome.signum is None:
            cell = waiting.popleft()
            process = self._context.Process(target=_work, args=("train_cell", self._root, cell, self._guard))
            process.start()
            self._running[process] = cell, time.monotonic()
        if self._outcome.signum is not None:  # a signal came while a process started
            self._terminate()

    def _at(self, elsewhere: int) -> str:
        """Says at which rounds the running runs are, and how many run elsewhere or have failed."""
        rounds = [str(rounds_trained(self._root / cell.folder)) for cell, _ in self._running.values()]
        return f"at round {' '.join(rounds) or '-'}, elsewhere={elsewhere}, failed={len(self._outcome.failed)}"

    def _end(self, process: BaseProcess, held: list[Cell], bar: Any) -> None:
        """Prints how a run ended."""
        cell, started = self._running.pop(process)
        process.join()
        took, code = time.monotonic() - started, process.exitcode
        ends = {0: f"done in {took:.0f} s", DIVERGED: f"diverged after {took:.0f} s", PRUNED: _EARLY}
        if code == HELD:
            held.append(cell)
        elif code in ends:
            bar.update()
            self._took.append(took)
            self._tell(cell, ends[code], bar.total)
            self._ended(cell, code == PRUNED)
        elif self._outcome.signum is None:
            self._outcome.failed.append(cell)
            self._tell(cell, f"failed, see {self._root / cell.folder / LOG}", bar.total)

    def _tell(self, cell: Cell, how: str, total: int) -> None:
        ended, now = self._before + len(self._took) + len(self._outcome.failed), time.monotonic()
        left = seconds_left(self._took, [now - began for _, began in self._running.values()], total - ended, self._jobs)
        about = f", about {tqdm.format_interval(left)} left" if left else ""
        self._say(f"{cell.label}: {how} ({ended} of {total}{about})")
        sys.stdout.flush()  # a log file is read while the other runs train

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Within the block passes Ctrl-C and SIGTERM on, so that runs end after their round, with a checkpoint."""
        former: dict[signal.Signals, Any] = {s: signal.signal(s, self._stop) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        if self._outcome.signum is None:
            sys.stderr.write("\nStopping after the current rounds; press Ctrl-C again to stop immediately.\n")
        self._outcome.signum = signum
        self._terminate()

    def _terminate(self) -> None:
        for process in list(self._running):
            process.terminate()


def seconds_left(took: Sequence[float], running: Sequence[float], missing: int, jobs: int) -> float:
    """Returns about how long runs still take, by the mean time of those that ended; 0 if none did.

    Args:
        took: Seconds that each of these took.
        running: Seconds that each running one has taken.
        missing: Number of runs that have not ended, these included.
        jobs: Number of runs at a time.
    """
    each = fmean(took) if took else 0.0
    return (each * missing - sum(min(each, spent) for spent in running)) / max(1, min(jobs, missing))


def _is_free(folder: Path) -> bool:
    """Whether no process trains in a folder now."""
    with RunLock() as lock, suppress(FederatedError):
        lock.take(folder)
        return True
    return False


def _work(name: str, *args: object) -> object:
    """Calls a function of the worker by name, so that this program loads neither torch nor Lightning."""
    return getattr(import_module(_WORKER), name)(*args)


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
    states, left = Counter(submitted=1), _ASKS
    with tqdm(desc="Runs", unit="run", disable=not sys.stderr.isatty()) as bar:
        while True:
            planned, missing = plan()
            bar.n, bar.total = len(planned) - len(missing), len(planned)
            bar.set_postfix(states)
            with suppress(FederatedError):  # SLURM may be busy
                states = _states(name)
            left = _ASKS if states else left - 1  # files of other machines may appear late
            if not states and (not left or not missing):
                return missing
            time.sleep(_ASK_S)


def _states(name: str) -> Counter[str]:
    """Counts the tasks of a job in the queue by their state."""
    command = ["squeue", "--me", "--noheader", "--array", f"--name={name}", "--format=%T"]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        raise FederatedError(f"Expected SLURM to answer `squeue`, but it says: {' '.join(answer.stderr.split())}")
    return Counter(answer.stdout.lower().split())
