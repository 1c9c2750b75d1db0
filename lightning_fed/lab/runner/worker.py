"""Trains one run of a study in a process of its own, forked from a process that has only loaded the imports."""

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from io import StringIO
from multiprocessing.connection import wait
from multiprocessing.process import parent_process
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_fed.cli.exits import mistakes_in_one_sentence
from lightning_fed.cli.federated_cli import FederatedCLI
from lightning_fed.core.files import writing
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.errors import Diverged, FederatedError, expect
from lightning_fed.lab.attack import command as attack_command
from lightning_fed.lab.attack.options import AttackOptions
from lightning_fed.lab.runner.record import (
    DIVERGED,
    HELD,
    LOG,
    PRUNED,
    Guard,
    done_run,
    hash_of,
    write_record,
)
from lightning_fed.lab.runner.storage import optuna_storage
from lightning_fed.lab.studies.cells import Cell, Watch
from lightning_fed.runs.folder import RunFolder
from lightning_fed.runs.lock import RunLock
from lightning_fed.trainer import FederatedTrainer

__all__ = ["Pruning", "end_with_parent", "mistake_in", "train_cell"]

_FIRST = 0.2
_BETWEEN_RUNS = 10**6


def train_cell(root: Path, cell: Cell, guard: Guard) -> None:
    """Trains a run to its end, from its last checkpoint if it has one, and records it.

    Raises:
        SystemExit: With ``HELD`` if another process trains the run, else with the codes of ``lightning-fed fit``.
    """
    os.setpgid(0, 0)  # Ctrl-C goes only to the main program, which passes it on
    folder = root / cell.folder
    folder.mkdir(parents=True, exist_ok=True)
    with RunLock() as lock:
        try:
            lock.take(folder)
        except FederatedError:
            raise SystemExit(HELD) from None
        if done_run(root, cell) is None:
            with mistakes_in_one_sentence():
                _write_to(folder / LOG)
                end_with_parent()
                torch.set_num_threads(1)
                hash_of(cell)  # read the files now: an edit during the training makes it another run
                guard()
                _train(root, cell)


def _train(root: Path, cell: Cell) -> None:
    pruning = None if cell.watch is None else Pruning(cell.watch)
    place = (f"--trainer.default_root_dir={root}", f"--trainer.name={cell.folder}")
    words = [*cell.words, *place, "--ckpt_path=last"]
    sys.argv[1:], sys.modules["__main__"].__spec__ = words, find_spec("lightning_fed")  # for its other processes
    watched = _Watched(words, pruning)
    run = watched.trainer.run
    if pruning is not None and pruning.pruned:
        raise SystemExit(PRUNED)
    if run is None or not run.metrics.is_file():
        raise FederatedError("Expected runs of a study to write metrics.csv: leave `--trainer.logger false` out.")
    if cell.attack is not None and not watched.diverged:
        _attack(cell.attack, run, watched.trainer)
    write_record(root, cell, run, watched.diverged, watched.trainer.max_rounds)
    if watched.diverged:
        raise SystemExit(DIVERGED)


def _attack(options: AttackOptions, run: RunFolder, trainer: FederatedTrainer) -> None:
    """Attacks the model of a run with ``lightning-fed attack``, which writes the figures into the run's folder."""
    expect(
        trainer.round <= trainer.max_rounds,
        f"Expected a model of {trainer.max_rounds} rounds to attack, but {run.path} has been trained for "
        f"{trainer.round}: give the study another `--output`.",
    )
    words = ["--ckpt_path", str(run.path), *options.words]
    sys.argv[1:] = ["attack", *words]  # for its other processes
    attack_command.main(words)


def _write_to(path: Path) -> None:
    """Appends the output of this process to a file; a link that somebody sent could lead anywhere, a pipe wait."""
    sys.stdout.flush()
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    with writing(path, "--output"), open(os.open(path, flags, 0o666), "ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)


def end_with_parent() -> None:
    """Sees to it that this process is asked to end if the main program has been killed: training after its round."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)


class Pruning(FederatedCallback):
    """Reports a metric to Optuna after each round, and stops the run if Optuna's median pruner says so.

    It begins after a fifth of the rounds, as in Dandi et al., AAAI 2022 (appendix B.2); ``pruned`` says whether it has
    stopped the run.
    """

    def __init__(self, watch: Watch) -> None:
        import optuna

        storage = optuna_storage(watch.storage)
        study = optuna.load_study(study_name=watch.study, storage=storage, pruner=optuna.pruners.MedianPruner())
        self._trial = optuna.trial.Trial(study, study.trials[watch.number]._trial_id)
        self._watch, self.pruned = watch, False

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Compares the newest value with the values of other trials at the same round of their corresponding run."""
        value = trainer.callback_metrics.get(self._watch.metric)
        if value is None or trainer.round < _FIRST * trainer.max_rounds:
            return
        try:
            self._trial.report(float(value), self._watch.run * _BETWEEN_RUNS + trainer.round)
            self.pruned = self._trial.should_prune()
        except RuntimeError:  # another run of this trial was ended early
            self.pruned = True
        trainer.should_stop = trainer.should_stop or self.pruned


class _Watched(FederatedCLI):
    """Trains like ``fit``, with an additional callback that is not an option of the run."""

    def __init__(self, words: list[str], pruning: Pruning | None) -> None:
        self._pruning, self.diverged = pruning, False
        super().__init__(words)

    def after_instantiate_classes(self) -> None:
        """Adds the callback, before the aggregator's and the checkpoint's."""
        super().after_instantiate_classes()
        if self._pruning is not None:
            self.trainer.callbacks.insert(0, self._pruning)

    def _run_subcommand(self, subcommand: str) -> None:
        """Counts a diverged run as done, as it would diverge again."""
        try:
            super()._run_subcommand(subcommand)
        except Diverged as error:
            print(error)
            self.diverged = True


class _Parsed(FederatedCLI):
    """Only parses the arguments of runs, all by one parser, which takes longer to make than to use."""

    def parse(self, words: Sequence[str]) -> dict[str, Any]:
        """Returns the configuration of a run."""
        self.parse_arguments(self.parser, list(words))
        self._set_seed()
        vars(self).pop("config_dump", None)  # of the run before
        self._dump_config()
        return dict(self.config_dump)

    def instantiate_classes(self) -> None:
        """Builds nothing."""

    def after_instantiate_classes(self) -> None:
        """Does nothing, as there is no trainer."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Runs nothing."""


def mistake_in(cells: Sequence[Cell], guard: Guard) -> str:
    """Parses the arguments of some runs and returns the first mistake, empty if there is none.

    Two runs with the same configuration are a mistake too: a later configuration overwrites what an axis sets.
    """
    _write_to(Path(os.devnull))
    said = sys.stderr = StringIO()
    try:
        with mistakes_in_one_sentence():
            guard()
            seen, reader = dict[str, Cell](), _Parsed(list(cells[0].words))
            for cell in cells:
                config = json.dumps(reader.parse(cell.words), default=str, sort_keys=True)
                _expect_same_axes(seen.setdefault(config, cell), cell)
    except SystemExit:
        return (said.getvalue().strip().splitlines() or ["The process has ended."])[-1]
    return ""


def _expect_same_axes(cell: Cell, other: Cell) -> None:
    if names := [f"`{axis}`" for axis, value in cell.axes.items() if value != other.axes[axis]]:
        raise FederatedError(
            f"Expected different values of {', '.join(names)} to give different runs, but {cell.label} has the same "
            f"configuration as {other.label}: move an axis that sets options behind the axes whose configurations "
            "overwrite them."
        )
