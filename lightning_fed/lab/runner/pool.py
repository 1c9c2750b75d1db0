"""Trains several runs at a time in processes, with one progress bar; if you stop it, nothing is lost."""

import os
import signal
import sys
import time
from collections import deque
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
from types import FrameType
from typing import Any

from tqdm import tqdm

from lightning_fed.errors import FederatedError
from lightning_fed.lab.runner.record import DIVERGED, HELD, LOG, PRUNED, Guard, done_run
from lightning_fed.lab.studies.cells import Cell
from lightning_fed.runs.lock import RunLock

__all__ = ["Outcome", "Pool"]

_LOOK_S = 1.0
_WORKER = "lightning_fed.lab.runner.worker"


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
        self._outcome = Outcome()
        self._ended: Callable[[Cell, bool], object] = lambda cell, early: None

    def mistake(self, cells: Sequence[Cell]) -> str:
        """Returns the first mistake in the options of some runs, empty if there is none."""
        with ProcessPoolExecutor(1, self._context) as reader:
            try:
                return str(reader.submit(_work, "mistake_in", cells, self._guard).result())
            except BrokenProcessPool:
                return "The process that checks the options of the runs has ended."

    def train(self, cells: Sequence[Cell], ended: Callable[[Cell, bool], object] = lambda cell, early: None) -> Outcome:
        """Trains the runs that are not done, and waits for runs that other programs train.

        After each run it calls ``ended`` with the run and whether it was ended early.
        """
        self._outcome, self._ended = Outcome(), ended
        open_runs = [cell for cell in cells if done_run(self._root, cell) is None]
        waiting, held = deque(open_runs), list[Cell]()
        bar = tqdm(total=len(cells), initial=len(cells) - len(open_runs), desc="Runs", unit="run",
                   disable=not sys.stderr.isatty())  # fmt: skip
        with self._signals(), bar:
            while self._running or ((waiting or held) and self._outcome.signum is None):
                self._start(waiting)
                bar.set_postfix(running=len(self._running), elsewhere=len(held), failed=len(self._outcome.failed))
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

    def _end(self, process: BaseProcess, held: list[Cell], bar: Any) -> None:
        """Prints how a run ended."""
        cell, started = self._running.pop(process)
        process.join()
        if process.exitcode == HELD:
            held.append(cell)
            return
        if process.exitcode in (0, DIVERGED):
            bar.update()
            how = "diverged after" if process.exitcode else "done in"
            self._say(f"{cell.label}: {how} {time.monotonic() - started:.0f} s")
            self._ended(cell, False)
        elif process.exitcode == PRUNED:
            bar.update()
            self._say(f"{cell.label}: ended early, as other trials are better")
            self._ended(cell, True)
        elif self._outcome.signum is None:
            self._outcome.failed.append(cell)
            self._say(f"{cell.label}: failed, see {self._root / cell.folder / LOG}")

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


def _is_free(folder: Path) -> bool:
    """Whether no process trains in a folder now."""
    with RunLock() as lock, suppress(FederatedError):
        lock.take(folder)
        return True
    return False


def _work(name: str, *args: object) -> object:
    """Calls a function of the worker by name, so that this program loads neither torch nor Lightning."""
    return getattr(import_module(_WORKER), name)(*args)
