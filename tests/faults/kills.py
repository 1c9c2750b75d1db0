"""Runs that are killed at an operation on a file or at any moment, again and again, and then go on to the same bits."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.end_to_end.command import assert_same_run, fit_words, run_folders, start
from tests.faults.counts import Counts, Outcome
from tests.faults.disks import Disk, failing
from tests.faults.tiny import fit, same, versions

TRIALS = 120
ENGINES = ("sequential", "vectorized")
LIMIT_S = 120.0
OF_TWO_PROCESSES = 3


class Deadly(Disk):
    """Kills the process at an operation, within the file if it is a write."""

    def touch(self, what: Any) -> None:
        try:
            super().touch(what)
        except OSError:
            os.kill(os.getpid(), signal.SIGKILL)


def in_a_child(folder: Path, disk: Disk, kill_after: float | None = None, **options: Any) -> tuple[int, str]:
    """Trains in a forked process, which starts at once; returns its exit status, negative for a signal, and stderr."""
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if not child:
            status = 1
            with contextlib.suppress(BaseException):
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                try:
                    with failing(disk), warnings.catch_warnings():
                        fit(folder, ckpt_path="last", **options)
                    status = 0
                except BaseException:
                    os.write(2, traceback.format_exc().encode())
            os._exit(status)
        deadline = time.monotonic() + (LIMIT_S if kill_after is None else kill_after)
        while not (done := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                done = os.waitpid(child, 0)
                break
            time.sleep(0.002)
        said.seek(0)
        return os.waitstatus_to_exitcode(done[1]), said.read().decode(errors="replace")


def trial(folder: Path, whole: Path, operations: int, chance: random.Random, engine: str) -> tuple[Outcome, str]:
    """Kills a run up to three times, then lets it end; returns the outcome and what was done."""
    done = [engine]
    for _ in range(chance.choice((1, 1, 2, 3))):
        at = chance.randrange(operations) if chance.random() < 0.7 else None
        after = None if at is not None else chance.random()
        done.append(f"at operation {at}" if at is not None else f"after {after:.3f} s")
        status, said = in_a_child(folder, Deadly(folder, at), after, engine=engine)
        if status not in (0, -signal.SIGKILL):
            return "traceback", f"{', '.join(done)}: {said[-500:]}"
    status, said = in_a_child(folder, Disk(folder), engine=engine)
    if status:
        return ("hang" if status == -signal.SIGKILL else "traceback"), f"{', '.join(done)}: {said[-500:]}"
    left = list((folder / "run").glob("version_*/**/.*.tmp"))
    if left or not same(versions(folder)[-1], whole):
        return "wrong success", f"{', '.join(done)}: {left or 'other numbers'}"
    begun = [run for run in versions(folder)[:-1] if any(run.glob("checkpoints/*.ckpt"))]
    return ("lost" if begun else "right"), ", ".join(done)


def of_two_processes(root: Path, chance: random.Random, count: int) -> Counts:
    """Kills the program while two processes train, after some row, all of it or one process alone."""
    counts, words = Counts(), ("--trainer.devices=2", "--ckpt_path=last")
    whole = _ended(start(fit_words(root / "whole", 12, *words), start_new_session=True))
    for number in range(count if whole == 0 else 0):
        folder, row = root / f"{number}", chance.randrange(1, 10)
        process = start(fit_words(folder, 12, *words), start_new_session=True)
        while process.poll() is None and not _has_row(folder, row):
            time.sleep(0.005)
        time.sleep(0.05 * chance.random())
        kill = os.killpg if number % 2 else os.kill
        with contextlib.suppress(ProcessLookupError):
            kill(process.pid, signal.SIGKILL)
        _ended(process)
        status = _ended(start(fit_words(folder, 12, *words), start_new_session=True))
        outcome: Outcome = "right" if status == 0 else "hang" if status is None else "traceback"
        try:
            assert_same_run(*(run_folders(place)[-1] for place in (root / "whole", folder)))
        except (AssertionError, OSError):
            outcome = "wrong success" if outcome == "right" else outcome
        counts.note(outcome, f"two processes killed after row {row}: exit {status}")
    if whole != 0:
        counts.note("traceback", f"two processes that nobody killed: exit {whole}")
    return counts


def _has_row(folder: Path, row: int) -> bool:
    tables = list(folder.glob("run/version_*/metrics.csv"))
    return any(table.read_bytes().count(b"\n") > row for table in tables)


def _ended(process: "subprocess.Popen[str]") -> int | None:
    """Returns the exit status, None of one that had to be ended."""
    try:
        process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None
    return process.returncode


def run(trials: int, seed: int) -> Counts:
    """Runs the campaign, a few trials of it by the command line with two processes."""
    counts = Counts()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked process has no other
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        operations = {}
        for engine in ENGINES:
            with failing(Disk(root / engine)) as disk:
                fit(root / engine, engine=engine)
            operations[engine] = disk.done
        programs = OF_TWO_PROCESSES if trials > 20 else 0
        for number in range(trials - programs):
            engine = ENGINES[number % len(ENGINES)]
            chance, folder = random.Random(f"{seed} {number}"), root / f"{number}"
            (whole,) = versions(root / engine)
            outcome, said = trial(folder, whole, operations[engine], chance, engine)
            counts.note(outcome, f"seed {seed}, trial {number}: {said}")
            shutil.rmtree(folder)
        torch.set_num_threads(threads)
        if programs:
            more = of_two_processes(root, random.Random(seed), programs)
            for outcome, times in more.of.items():
                counts.of[outcome] += times
            counts.tried, counts.wrong = counts.tried + more.tried, counts.wrong + more.wrong
    return counts
