"""A trainer's record of a run: its folder (found again or new), its config, and how it ended.

After Ctrl-C or SIGTERM a run finishes its round, saves and stops; a second Ctrl-C stops it at once.
"""

import json
import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_fed.aggregators import Aggregator
from lightning_fed.callbacks.progress import newest_metrics
from lightning_fed.client_algorithms import ClientAlgorithm
from lightning_fed.core.files import WriteError, write_atomically
from lightning_fed.core.updates import Need, ReducedUpdate
from lightning_fed.core.user_code import describe
from lightning_fed.engines import Engine
from lightning_fed.errors import FederatedError
from lightning_fed.runs.checkpoint_files import find_checkpoint, find_to_train
from lightning_fed.runs.folder import RunFolder, create_run, fingerprint
from lightning_fed.runs.lock import RunLock, remove_leftovers
from lightning_fed.runs.log import RunLog, keep_picture
from lightning_fed.trainer.evaluation import say_whose
from lightning_fed.trainer.lightning_names import LightningNames
from lightning_fed.trainer.options import TrainerOptions

__all__ = ["Bookkeeping", "StopRequest", "going_on", "graceful_stop", "round_costs"]


@contextmanager
def going_on(trainer: LightningNames) -> Iterator[None]:
    """Lets a run go on if the system refuses to write a file in the block and ``on_write_error`` is ``continue``."""
    try:
        yield
    except WriteError as error:
        if trainer.options.tolerance.on_write_error == "stop":
            raise
        rank_zero_warn(f"Round {trainer.round} goes on, by `--trainer.tolerance.on_write_error continue`: {error}")


class StopRequest:
    """Remembers the signal that asked the run to stop; all processes get it, but only one prints that it stops.

    Attributes:
        process: The id of the process that started the run.
    """

    def __init__(self, speaks: bool = True) -> None:
        self.signum: int | None = None
        self._speaks = speaks
        self.process = os.getpid()

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Handles a signal: the first one asks for a stop after the round, the second one interrupts at once."""
        if os.getpid() != self.process:  # a forked worker inherits the handler; the signal is for the trainer
            return
        if self.signum is not None:
            raise KeyboardInterrupt
        self.signum = signum
        if self._speaks:
            sys.stderr.write("\nStopping after this round; press Ctrl-C again to stop at once.\n")


@contextmanager
def graceful_stop(speaks: bool = True) -> Iterator[StopRequest]:
    """Handles SIGINT and SIGTERM within the block and restores the former handlers after it.

    Outside the main thread, where Python allows no handlers, nothing is changed.
    """
    request = StopRequest(speaks)
    former: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        former = {s: signal.signal(s, request) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


class Bookkeeping:
    """A trainer's record of its run, from the options as given and a short name of the method."""

    def __init__(self, given: TrainerOptions, label: str) -> None:
        self.root, self.label = Path(given.default_root_dir), label
        self.name = label.lower() if given.name is None else given.name
        self._described = given.describe()
        one = given.callbacks
        self._given = [(cb, describe(cb)) for cb in ([one] if isinstance(one, Callback) else one or [])]
        self.run: RunFolder | None = None
        self.run_config: dict[str, Any] | None = None
        self.initial_weights: str | None = None
        self.ckpt_path: str | None = None
        self.interrupted: int | None = None
        self.stop_message = ""
        self.lock = RunLock()

    def config(self, trainer: LightningNames) -> dict[str, Any]:
        """Returns the resolved config: the command line's, or one described from the objects given in Python."""
        read = any(getattr(cb, "reads_length", False) for cb in trainer.callbacks)
        length = {"length": trainer.options.max_rounds} if read else {}  # else it may be changed
        if self.run_config is not None:
            return {**self.run_config, **length}
        model = trainer.lightning_module
        return {
            **length,
            "seed_everything": trainer.seed,
            "trainer": self._described,
            "model": {**describe(model), "init_args": describe(dict(model.hparams))},
            "data": describe(trainer.datamodule),
            "weights": self.initial_weights,
        }

    def named_config(self, trainer: LightningNames) -> dict[str, Any]:
        """Returns the config of a run from Python under the command line's names, which its fingerprint has not."""
        config, parts = self.config(trainer), dict[str, list[Any]](aggregator=[], client=[], callbacks=[])
        for callback, described in self._given:
            kinds = {"aggregator": Aggregator, "client": ClientAlgorithm, "callbacks": Callback}
            parts[next((name for name, kind in kinds.items() if isinstance(callback, kind)), "callbacks")].append(
                described
            )
        parts["aggregator"] = parts["aggregator"] or [describe(trainer.aggregator)]
        named: dict[str, Any] = {name: found[0] if len(found) == 1 else found for name, found in parts.items()}
        return {**config, "trainer": {**config["trainer"], "callbacks": named.pop("callbacks") or None}, **named}

    def find(
        self, trainer: LightningNames, ckpt_path: str | None, to_train: bool = False
    ) -> tuple[Path | None, RunFolder | None]:
        """Finds the checkpoint of a call, and its run; locks the run if training resumes from ``last``."""
        self.ckpt_path = None
        if ckpt_path is None:
            return None, None

        def find() -> tuple[Path | None, RunFolder | None]:
            mark = fingerprint(self.config(trainer))
            if not to_train or ckpt_path not in ("last", "best") or trainer.checkpoint_callback is None:
                return find_checkpoint(self.root, self.name, mark, ckpt_path)
            remove_leftovers(self.root / self.name)
            return find_to_train(self.root, self.name, mark, ckpt_path, self.lock)

        path, run = trainer.processes.from_first(find, "run")
        self.ckpt_path = None if path is None else str(path)
        return path, run

    def find_weights(
        self, trainer: LightningNames, ckpt_path: str | None, weights: str | None
    ) -> tuple[str | None, str]:
        """Returns the file of the model to evaluate (None for the module itself), and the option that gave it."""
        if ckpt_path is None:
            self.ckpt_path = None
            return weights, "--weights"
        if weights is not None:  # they are part of the config of the run to find
            self.initial_weights = weights
        path, _ = self.find(trainer, ckpt_path)
        if path is None:
            raise FederatedError(
                f"Expected a run with this config and a `{ckpt_path}` checkpoint under {self.root / self.name}, found "
                "none: run `fit` first or give a path as `--ckpt_path`."
            )
        return str(path), "--ckpt_path"

    def own_checkpoint(self, trainer: LightningNames, ckpt_path: str | None) -> str | None:
        """Returns the checkpoint to evaluate, from this trainer's own run if it has it; by default ``best``."""
        wanted = ckpt_path or "best"
        if wanted not in ("best", "last"):
            return ckpt_path
        kept = [getattr(cb, f"{wanted}_model_path", "") for cb in trainer.checkpoint_callbacks]
        path = next((path for path in kept if path and Path(path).is_file()), None)
        if ckpt_path is None and path is not None:
            rank_zero_info(f"Evaluating the best model of the last `fit`, {path}.")
        return ckpt_path if path is None else path

    def open_run(self, trainer: LightningNames, ckpt_path: str | None, former: RunFolder | None, found: bool) -> None:
        """Continues the folder of a run found by ``last``; otherwise makes a new one if anything will be written."""
        self.run, options = None, trainer.options
        saves = trainer.checkpoint_callback is not None
        if options.fast_dev_run or (options.logger is False and not saves and self.run_config is None):
            return
        if ckpt_path == "last" and former is not None:
            self.run = former
            return
        if ckpt_path is not None and not found:
            rank_zero_info(f"No `{ckpt_path}` checkpoint of a run with this config was found: starting a new run.")

        def create() -> RunFolder:
            remove_leftovers(self.root / self.name)
            return create_run(self.root, self.name, self.config(trainer), self.label, trainer.seed, self.lock)

        self.run = trainer.processes.from_first(create, "run")

    def clear_away(self, trainer: LightningNames) -> None:
        """Removes the folder of a run that ended before its first row, because it holds no results."""
        run = self.run
        if run is not None and trainer.is_global_zero and not run.metrics.exists() and not run.checkpoints.exists():
            shutil.rmtree(run.path, ignore_errors=True)

    def log_start(self, trainer: LightningNames, log: RunLog) -> None:
        """Records config, split and size before the first round."""
        data, choice = trainer.datamodule, trainer.engine_choice
        layout = trainer.train_state.memory_format
        facts: dict[str, Any] = {"parameters": trainer.vector.all_numel, "engine": choice, "memory_format": layout}
        if personal := trainer.train_state.num_personal:
            facts["personal_parameters"] = personal
        notes = []
        if hasattr(data, "split_summary"):
            facts["split"] = data.split_summary()
            notes.append(f"# split {facts['split']['hash']}")
        if trainer.engine == "auto" and choice is not None:
            notes.append("# engine chosen by auto: " + ", ".join(f"{k} {v}" for k, v in choice.items()))
        if trainer.options.memory_format == "auto":
            notes.append(f"# memory format chosen by auto: {layout}")
        about = {type(cb).__name__: text for cb in trainer.callbacks if (text := getattr(cb, "about", ""))}
        facts |= about
        notes += [f"# {name}: {what}" for name, what in about.items()]
        with going_on(trainer):
            log.log_config({**self.config(trainer), **facts}, trainer.lightning_module)
            path = None if self.run is None else self.run.path / "config.yaml"
            if path is not None and path.is_file():
                text = path.read_text()
                if notes := [line for line in notes if line not in text]:
                    write_atomically(path, "\n".join([text.rstrip("\n"), *notes, ""]).encode())
            elif self.run is not None and trainer.is_global_zero:  # the run was started from Python
                options = json.dumps(self.named_config(trainer), indent=2, default=str)
                write_atomically(self.run.path / "options.json", options.encode())
        if self.run is not None and log.loggers and trainer.is_global_zero:
            log.draw = partial(self._draw_split, trainer, self.run, log)

    def _draw_split(self, trainer: LightningNames, run: RunFolder, log: RunLog) -> None:
        """Writes the pictures of the split into the run's folder, and gives them to the loggers."""
        from lightning_fed.data import FederatedDataModule, split_figures

        if not isinstance(trainer.datamodule, FederatedDataModule):
            return
        try:
            for name, figure in split_figures(trainer.datamodule, trainer.source):
                keep_picture(figure, run.path / f"{name}.png", log.loggers)
        except Exception as error:  # a picture must not end the training
            rank_zero_warn(f"The pictures of the split could not be drawn ({type(error).__name__}: {error}).")

    def report_end(self, trainer: LightningNames, signum: int | None) -> None:
        """Prints the folder of a finished run, or how to resume a run that a signal stopped."""
        done = trainer.finished_round
        if signum is None or done >= trainer.options.max_rounds:
            if self.run is not None:
                shown = [f"{k} {v:.4g}" for k, v in sorted(newest_metrics(trainer).items())]
                early = f"{done} of {trainer.max_rounds} rounds, ended by {trainer.hooks.stopper}, in"
                said = early if trainer.hooks.stopper and done < trainer.max_rounds else f"{done} rounds in"
                rank_zero_info(f"{said} {self.run.path}: {', '.join(shown) or 'done'}")
                say_whose(trainer.callbacks if trainer.val_loaders else ())
            return
        self.interrupted = int(signum)
        trainer.state.status = TrainerStatus.INTERRUPTED
        self.stop_message = f"Stopped by {signal.Signals(signum).name} after round {done}; {self._resume()}"
        if self.run_config is None and trainer.is_global_zero:
            sys.stderr.write(self.stop_message + "\n")

    def position(self, trainer: LightningNames) -> tuple[str, str]:
        """Returns the round of a call and how to go on after a failure, for messages."""
        if trainer.state.fn != TrainerFn.FITTING:
            return "", "start it again."
        resumes = self.run is not None and (self.run.checkpoints / "last.ckpt").is_file()
        return f" in round {trainer.round}", self._resume() if resumes else "start it again."

    def _resume(self) -> str:
        config = None if self.run is None else self.run.path / "config.yaml"
        if config is not None and config.is_file():
            return f"resume with: lightning-fed fit --config {shlex.quote(str(config))} --ckpt_path last"
        return "resume with: fit(model, datamodule, ckpt_path='last')"


def round_costs(trainer: LightningNames, engine: Engine, update: ReducedUpdate) -> dict[str, int]:
    """Counts what one round adds to the totals.

    Each client that entered gets the model and sends its update, which says its bytes, and what it sends besides
    (``Update.sums``): one communication round. Gradients and what methods send down have the model's length d; buffers
    travel with the model if they are averaged. An exchange before training (gradients up, their mean down) is a
    communication round of its own, however many methods use it; where nothing is sent there is none.
    Reductions, losses and counts are scalars and not counted. ``gradients`` are samples whose gradient was computed, or
    their loss alone for a rule that asks for the clients' losses.
    """
    aggregator = trainer.aggregator
    algorithms = [callback for callback in trainer.callbacks if isinstance(callback, ClientAlgorithm)]
    exchanges, by_rule = int(engine.start_gradients.exchanged), bool(aggregator.all_needs & Need.ANY_GRADIENT)
    at_start = any(algorithm.sends_gradient for algorithm in algorithms)
    at_start |= by_rule and aggregator.gradient_at == "start"
    sends_gradient = (at_start and not exchanges) + (by_rule and aggregator.gradient_at != "start")
    down = 1 + aggregator.vectors_down + sum(algorithm.vectors_down for algorithm in algorithms)
    vector = trainer.vector.numel * trainer.vector.data.element_size()
    buffers = trainer.buffers.num_bytes if trainer.buffers.policy == "average" else 0
    clients = update.num_clients
    return {
        "samples": engine.counts.samples,
        "gradients": engine.counts.samples + engine.counts.gradients,
        "comm/rounds": bool(down or sends_gradient or engine.counts.bytes_up) + exchanges if clients else 0,
        "comm/bytes_down": ((down + exchanges) * vector + buffers) * clients,
        "comm/bytes_up": engine.counts.bytes_up + ((sends_gradient + exchanges) * vector + buffers) * clients,
    }
