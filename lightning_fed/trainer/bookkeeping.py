"""What a trainer keeps of a run: its folder, found again or made, its config, and how it ended."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_info

from lightning_fed.aggregators import Aggregator
from lightning_fed.client_algorithms import ClientAlgorithm
from lightning_fed.core.describe import describe
from lightning_fed.core.files import write_atomically
from lightning_fed.core.vector import ParameterVector
from lightning_fed.errors import FederatedError
from lightning_fed.runs.checkpoints import find_checkpoint
from lightning_fed.runs.folder import RunFolder, create_run, fingerprint
from lightning_fed.runs.log import RunLog
from lightning_fed.trainer.facade import TrainerFacade

__all__ = ["RunKeeping"]


class RunKeeping(TrainerFacade):
    """The part of a trainer that deals with run folders.

    Attributes:
        run: The run's folder, None if nothing is written.
        finished_round: The last round whose row and checkpoint were due and written.
        initial_weights: What was given as ``weights``.
    """

    aggregator: Aggregator
    name: str
    default_root_dir: Path
    logger_choice: Any
    vector: ParameterVector
    source: Any
    engine: str
    engine_choice: dict[str, Any] | None
    _options: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self.run: RunFolder | None = None
        self.finished_round = 0
        self.initial_weights: str | None = None

    @property
    def label(self) -> str:
        """A short name of the method, such as ``FedAvg+SignAgreement``."""
        algorithms = [type(cb).__name__ for cb in self.callbacks if isinstance(cb, ClientAlgorithm)]
        return "+".join([self.aggregator.label, *algorithms])

    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _config(self) -> dict[str, Any]:
        """The resolved config: the command line's, or one described from the objects given in Python."""
        if self.run_config is not None:
            return self.run_config
        model = self._module()
        return {
            "seed_everything": self.seed,
            "trainer": self._options,
            "model": {**describe(model), "init_args": describe(dict(model.hparams))},
            "data": describe(self.datamodule),
            "weights": self.initial_weights,
        }

    def _find(self, ckpt_path: str) -> tuple[Path | None, RunFolder | None]:
        return self.processes.from_first(
            lambda: find_checkpoint(self.default_root_dir, self.name, fingerprint(self._config()), ckpt_path), "run"
        )

    def _choose_run(
        self, ckpt_path: str | None, source: tuple[Path | None, RunFolder | None] | None
    ) -> RunFolder | None:
        """Continues the folder of a run found as ``last``; makes a new one, if anything will be written, otherwise."""
        saves = any(isinstance(cb, Checkpoint) for cb in self.callbacks)
        if self.fast_dev_run or (self.logger_choice is False and not saves and self.run_config is None):
            return None
        if ckpt_path == "last" and source is not None and source[1] is not None:
            return source[1]
        if source is not None and source[0] is None:
            rank_zero_info(f"No `{ckpt_path}` checkpoint of a run with this config was found: starting a new run.")
        return self.processes.from_first(self._create_run, "run")

    def _create_run(self) -> RunFolder:
        try:
            return create_run(self.default_root_dir, self.name, self._config(), self.label, self.seed)
        except OSError as error:
            raise FederatedError(
                f"Expected to make a run folder in {self.default_root_dir / self.name}, but the system refuses "
                f"({error.strerror}): change `--trainer.default_root_dir`."
            ) from error

    def _clear_away(self, run: RunFolder | None) -> None:
        """Removes the folder of a run that ended before its first row: it holds nothing but its own name."""
        if run is not None and self.is_global_zero and not run.metrics.exists() and not run.checkpoints.exists():
            shutil.rmtree(run.path, ignore_errors=True)

    def _keep_rows(self, source: RunFolder | None) -> None:
        """Takes over the rows of the run that this one goes on from, if it has a folder of its own."""
        other = source is not None and self.run is not None and source.path != self.run.path
        if source is not None and self.run is not None and other and source.metrics.is_file() and self.is_global_zero:
            shutil.copyfile(source.metrics, self.run.metrics)

    def _log_start(self, log: RunLog) -> None:
        """Records config, split and size before the first round."""
        facts: dict[str, Any] = {"parameters": self.vector.numel, "engine": self.engine_choice}
        if hasattr(self.datamodule, "split_summary"):
            facts["split"] = self.datamodule.split_summary()
        log.log_config({**self._config(), **facts})
        self._note_below_config(facts)
        if self.run is not None and log.loggers and self.is_global_zero:
            self._draw_split(self.run, log)

    def _note_below_config(self, facts: dict[str, Any]) -> None:
        """Writes below the run's config what its start has shown: the split's hash, what ``auto`` chose and why."""
        path = None if self.run is None else self.run.path / "config.yaml"
        if path is None or not path.is_file():
            return
        lines = [f"# split {facts['split']['hash']}"] if "split" in facts else []
        if self.engine == "auto" and self.engine_choice is not None:
            lines.append("# engine chosen by auto: " + ", ".join(f"{k} {v}" for k, v in self.engine_choice.items()))
        text = path.read_text()
        new = [line for line in lines if line not in text]
        if new:
            write_atomically(path, "\n".join([text.rstrip("\n"), *new, ""]).encode())

    def _draw_split(self, run: RunFolder, log: RunLog) -> None:
        """Writes the pictures of the split into the run's folder, and gives them to the loggers."""
        from lightning_fed.data import FederatedDataModule, split_figures

        if not isinstance(self.datamodule, FederatedDataModule):
            return
        for name, figure in split_figures(self.datamodule, self.source):
            path = run.path / f"{name}.png"
            figure.savefig(path)
            log.log_picture(name, path)

    def _report_end(self, signum: int | None) -> None:
        """Says where a finished run lies, or how to resume one that a signal stopped."""
        done = self.finished_round
        if signum is None or done >= self.max_rounds:
            if self.run is not None:
                shown = [f"{k} {v:.4g}" for k, v in sorted(self.metrics.progress_bar.items())]
                rank_zero_info(f"{done} rounds in {self.run.path}: {', '.join(shown) or 'done'}")
            return
        self.interrupted = int(signum)
        self.state.status = TrainerStatus.INTERRUPTED
        config = None if self.run is None else self.run.path / "config.yaml"
        if config is not None and config.is_file():
            resume = f"lightning-fed fit --config {shlex.quote(str(config))} --ckpt_path last"
        else:
            resume = "fit(model, datamodule, ckpt_path='last')"
        self.stop_message = f"Stopped by {signal.Signals(signum).name} after round {done}; resume with: {resume}"
        if self.run_config is None and self.is_global_zero:
            sys.stderr.write(self.stop_message + "\n")
