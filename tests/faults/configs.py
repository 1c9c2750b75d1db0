"""Mutated configurations, words and variables: each ends in one sentence, or runs with what was written.

A trial is made of its seed and number alone. It is parsed and built within one of two workers that the campaign starts;
one that hangs, or dies, is replaced. A tenth of those that are taken trains for a round.
"""

import contextlib
import functools
import io
import multiprocessing
import os
import resource
import sys
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.faults.config_trials import Trial, make_trial
from tests.faults.counts import Counts, Outcome

__all__ = ["TRIALS", "Program", "judge", "run"]

TRIALS = 5000
_LIMIT, _MEMORY = 60.0, 16 << 30  # seconds for a trial, bytes of addresses for a worker
_SAID = ("Seed set", "[rank: ")


@dataclass
class Program:
    """The command line within this process, up to ``fit``, which is recorded; for some trials a round is trained.

    Attributes:
        configs: What ``fit`` was called with.
    """

    configs: list[dict[str, Any]] = field(default_factory=list)

    def install(self) -> None:
        """Takes the places of ``fit`` and of the commands, for the rest of this process."""
        from lightning_fed.cli.federated_cli import FederatedCLI
        from lightning_fed.trainer import FederatedTrainer

        fit, subcommands = FederatedTrainer.fit, FederatedCLI.subcommands()["fit"]

        @functools.wraps(fit)
        def recorded(trainer: Any, *args: Any, **kwargs: Any) -> None:
            self.configs.append(trainer.run_config)
            if trainer.options.fast_dev_run:
                fit(trainer, *args, **kwargs)

        FederatedTrainer.fit = recorded
        FederatedCLI.subcommands = staticmethod(lambda: {"fit": subcommands})

    def run(self, words: list[str]) -> tuple[int, str]:
        """Runs it, and returns its exit status and what it said on stderr.

        Raises:
            BaseException: What would have been a traceback.
        """
        from lightning_fed.cli import main

        err, status = io.StringIO(), 0
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                main(words)
            except SystemExit as ended:
                status = int(ended.code or 0)
        return status, err.getvalue()


def judge(program: Program, trial: Trial, trains: bool) -> tuple[Outcome, str]:
    """Runs a trial in the working folder and says what became of it."""
    words = ["fit"]
    for at, content in enumerate(trial.files):
        Path(f"{at}.yaml").write_bytes(content)
        words += ["--config", f"{at}.yaml"]
    few = [
        "--trainer.fast_dev_run",
        "1",
        "--trainer.devices",
        "1",
        "--trainer.num_nodes",
        "1",
        "--trainer.logger",
        "false",
    ]
    before = dict(os.environ)
    os.environ.update(trial.variables)
    program.configs.clear()
    try:
        status, said = program.run([*words, *trial.words, *(few if trains else [])])
        same = trial.expected != "same" or program.run([*words[:-2], *trial.words])[0] == 0
    except BaseException as error:
        return "traceback", f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        os.environ.clear()
        os.environ.update(before)
    lines = [line for line in said.splitlines() if line.strip() and not line.startswith(_SAID)]
    if "Traceback" in said or (status and (len(lines) != 1 or lines[0][-1] not in ".?")):
        return "traceback", f"status {status}, {lines[-2:]}"
    if trial.expected == "refused" and status == 0:
        return "wrong success", "taken"
    if trial.expected == "same" and not trains and (status or not same or program.configs[0] != program.configs[-1]):
        return "wrong success", f"changed, {lines[-1:]}"
    return "right", lines[-1] if status else ""


def _work(pipe: Connection, seed: int) -> None:
    """Does trials whose numbers come from the pipe, in a folder of its own, until it is closed."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries write there by themselves
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(EOFError):
        os.chdir(folder)
        program = Program()
        program.install()
        os.mkfifo("pipe")  # which some trials name
        pipe.send(None)
        while True:
            number = pipe.recv()
            pipe.send((number, *judge(program, make_trial(seed, number), number % 10 == 0)))


class _Worker:
    """A process that does trials, and is replaced when it hangs."""

    def __init__(self, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, seed), daemon=True)
        self.process.start()
        theirs.close()
        self.pipe.recv()

    def trial(self, number: int) -> tuple[Outcome, str]:
        """Does a trial."""
        self.pipe.send(number)
        if not self.pipe.poll(_LIMIT):
            return "hang", f"after {_LIMIT:.0f} s"
        try:
            _, outcome, said = self.pipe.recv()
        except EOFError:
            return "traceback", "the process died"
        return outcome, said

    def end(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.join()


def _some(seed: int, numbers: range, note: Callable[[Outcome, str], None]) -> None:
    """Does trials one after another in a worker."""
    worker = _Worker(seed)
    for number in numbers:
        outcome, said = worker.trial(number)
        note(outcome, f"trial {number} of seed {seed} ({', '.join(make_trial(seed, number).mutations)}): {said}")
        if outcome == "hang" or said == "the process died":
            worker.end()
            worker = _Worker(seed)
    worker.end()


def run(trials: int, seed: int) -> Counts:
    """Does the trials in two processes."""
    counts = Counts()
    with ThreadPoolExecutor(2) as pool:
        halves = [pool.submit(_some, seed, range(at, trials, 2), counts.note) for at in range(2)]
        for half in halves:
            half.result()
    return counts


if __name__ == "__main__":  # python -m tests.faults.configs SEED NUMBER shows one trial
    shown = make_trial(int(sys.argv[1]), int(sys.argv[2]))
    for content in shown.files:
        print(content.decode(errors="replace"), end="---\n")
    print(shown.words, shown.variables, shown.mutations, shown.expected)
