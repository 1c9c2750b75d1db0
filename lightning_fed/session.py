"""The life of one call of the trainer: attach, find a checkpoint, set up, record, take down."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_fed.aggregators import Aggregator
from lightning_fed.buffers import GlobalBuffers
from lightning_fed.callbacks.support import add_module_callbacks
from lightning_fed.client_algorithms import ClientAlgorithm
from lightning_fed.errors import FederatedError
from lightning_fed.evaluation import named_loaders
from lightning_fed.facade import TrainerFacade
from lightning_fed.hooks import Client
from lightning_fed.metrics import LoggedMetrics
from lightning_fed.optimizers import LocalOptimizer
from lightning_fed.run import Run, create_run, describe, fingerprint
from lightning_fed.runlog import RunLog
from lightning_fed.sampling import cohort_size
from lightning_fed.seeding import run_seed
from lightning_fed.setup import announce_device, move_to_device
from lightning_fed.state import find_checkpoint, load_weights, read_checkpoint, restore_state
from lightning_fed.vector import ParameterVector

__all__ = ["TrainerSession"]


class TrainerSession(TrainerFacade):
    """What ``fit``, ``validate``, ``test`` and ``predict`` share.

    Attributes:
        weights: The global vector w, shape (d,), float32 at least, on the device.
        vector: The live module's flat vector, while ``fit`` runs.
        buffers: The global model's buffers, while ``fit`` runs.
        client: The client that trains now.
        round_metrics: Scalars of the current round by name.
        resumed: Whether this ``fit`` goes on from a checkpoint.
        validated: Whether the current round has been validated.
        totals: Counts over the run: samples seen, communication rounds, bytes each way.
        run: The run's folder.
        source: The clients' batches, on the device.
        cohort_size: Clients drawn in a round.
    """

    aggregator: Aggregator
    name: str
    clients_per_round: int | float
    default_root_dir: Path
    logger_choice: Any
    local_schedule: Literal["restart", "continue"]
    _seed: int | None
    _options: dict[str, Any]

    weights: Tensor
    vector: ParameterVector
    buffers: GlobalBuffers
    source: Any
    cohort_size: int

    def __init__(self) -> None:
        super().__init__()
        self.run: Run | None = None
        self.val_loaders: dict[str, Any] = {}
        self.resumed = False
        self.reset_position()

    def reset_position(self) -> None:
        """Goes back to round 0 with nothing counted."""
        self.round = self.steps_before_round = self.local_step = 0
        self.client: Client | None = None
        self.metrics = LoggedMetrics({}, {}, {})
        self.round_metrics: dict[str, float] = {}
        self.validated = False
        self.totals = {"samples": 0, "comm/rounds": 0, "comm/bytes_down": 0, "comm/bytes_up": 0}

    @property
    def label(self) -> str:
        """A short name of the method, such as ``FedAvg+SignAgreement``."""
        algorithms = [type(cb).__name__ for cb in self.callbacks if isinstance(cb, ClientAlgorithm)]
        return "+".join([self.aggregator.label, *algorithms])

    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _set_up_evaluation(self, name: str, ckpt_path: str | None, weights: str | None) -> dict[str, Any]:
        """Sets up for validate, test or predict; returns its data sets by name."""
        model, option = self._module(), "--weights"
        if ckpt_path is not None:
            path, _ = self._find(ckpt_path)
            if path is None:
                raise FederatedError(
                    f"Expected a run with this config and a `{ckpt_path}` checkpoint under "
                    f"{self.default_root_dir / self.name}, found none: run `fit` first or give a path as `--ckpt_path`."
                )
            weights, option = str(path), "--ckpt_path"
        self.metrics = LoggedMetrics({}, {}, {})
        self._set_up_data(name)
        self._set_up(name)
        if weights is not None:
            load_weights(model, read_checkpoint(Path(weights), option), weights, option)
        move_to_device(self.fabric, model)
        method = {"validate": "val", "test": "test", "predict": "predict"}[name] + "_dataloader"
        loaders = named_loaders(getattr(self.datamodule, method)())
        if not loaders:
            raise FederatedError(f"Expected the datamodule to give data from `{method}`, got none: change `--data`.")
        return loaders

    @contextmanager
    def _attached(
        self, model: LightningModule, datamodule: LightningDataModule | None, fn: TrainerFn
    ) -> Iterator[None]:
        """Connects model and data for one call, and tells callbacks when it fails."""
        self.lightning_module, self.datamodule = model, datamodule
        self.seed = self._seed if self._seed is not None else run_seed()
        self.state.fn, self.state.status = fn, TrainerStatus.RUNNING
        self.state.stage = RunningStage.TRAINING if fn == TrainerFn.FITTING else RunningStage(fn.value)
        self.interrupted, self.stop_message, self.should_stop = None, "", False
        model.trainer = self  # type: ignore[assignment]  # stands in for Lightning's Trainer
        if datamodule is not None:
            datamodule.trainer = self  # type: ignore[assignment]
        try:
            self.callbacks = add_module_callbacks(self.callbacks, model)
            yield
            self.state.status = TrainerStatus.FINISHED
        except KeyboardInterrupt:
            self.state.status = TrainerStatus.INTERRUPTED
            self._report_end(signal.SIGINT)
        except BaseException as error:
            self.state.status = TrainerStatus.INTERRUPTED
            for callback in self.callbacks:
                callback.on_exception(self, model, error)  # type: ignore[arg-type]
            if datamodule is not None:
                datamodule.on_exception(error)
            raise
        finally:
            stage = "fit" if fn == TrainerFn.FITTING else fn.value
            if datamodule is not None:
                datamodule.teardown(stage)
            self.call("teardown", stage)
            if "vector" in vars(self):
                self.vector.release()
                del self.vector

    def _set_up_data(self, stage: str) -> None:
        """Prepares the data; before a run folder is made, so that a mistake in it leaves none behind."""
        self.datamodule.prepare_data()
        self._module().prepare_data()
        self.datamodule.setup(stage)
        if stage == "fit":
            self.source = self.datamodule.train_source().to(self.fabric.device)
            self.cohort_size = cohort_size(self.clients_per_round, len(self.source.sizes))

    def _set_up(self, stage: str) -> None:
        """Calls every ``setup`` after that of the data, in Lightning's order."""
        model = self._module()
        announce_device(self.fabric, model)
        for callback in self.callbacks:
            callback.setup(self, model, stage)  # type: ignore[arg-type]
        model.setup(stage)
        model.configure_model()

    def _set_up_training(self, weights: str | None, checkpoint: dict[str, Any] | None, source: str) -> None:
        """Builds the global vector, buffers and local optimizer, fresh or from a checkpoint."""
        model = self._module()
        if weights is not None:
            load_weights(model, read_checkpoint(Path(weights), "--weights"), weights, "--weights")
        if checkpoint is not None:
            load_weights(model, checkpoint, source, "--ckpt_path")
        self.reset_position()
        self.resumed = checkpoint is not None
        move_to_device(self.fabric, model)
        self.local_optimizer = LocalOptimizer(model, restart=self.local_schedule == "restart")
        self.strategy._lightning_optimizers = self.optimizers  # type: ignore[attr-defined]  # `self.optimizers()`
        self.vector = ParameterVector(model)
        wide = torch.promote_types(self.vector.dtype, torch.float32)
        self.weights = self.vector.data.to(wide, copy=True)
        self.buffers = GlobalBuffers(model, self.aggregator.buffers)
        has_validation = is_overridden("validation_step", model)
        self.val_loaders = named_loaders(self.datamodule.val_dataloader()) if has_validation else {}
        if checkpoint is not None:
            restore_state(self, checkpoint, source)
            self.load_global_model()

    def load_global_model(self) -> None:
        """Copies the global vector and buffers into the module."""
        self.vector.refresh()
        self.vector.data.copy_(self.weights)
        self.buffers.load()

    # Run folder

    def _config(self) -> dict[str, Any]:
        """The resolved config: the command line's, or one described from the objects given in Python."""
        if self.run_config is not None:
            return self.run_config
        model = self._module()
        return {
            "seed_everything": self.seed,
            "trainer": self._options,
            "callbacks": [describe(cb) for cb in self.callbacks],
            "model": {**describe(model), "init_args": describe(dict(model.hparams))},
            "data": describe(self.datamodule),
        }

    def _find(self, ckpt_path: str) -> tuple[Path | None, Run | None]:
        return find_checkpoint(self.default_root_dir, self.name, fingerprint(self._config()), ckpt_path)

    def _choose_run(self, ckpt_path: str | None, source: tuple[Path | None, Run | None] | None) -> Run | None:
        """Continues the folder of a run found as ``last``; makes a new one, if anything will be written, otherwise."""
        saves = any(isinstance(cb, Checkpoint) for cb in self.callbacks)
        if self.fast_dev_run or (self.logger_choice is False and not saves and self.run_config is None):
            return None
        if ckpt_path == "last" and source is not None and source[1] is not None:
            return source[1]
        if source is not None and source[0] is None:
            rank_zero_info(f"No `{ckpt_path}` checkpoint of a run with this config was found: starting a new run.")
        run = create_run(self.default_root_dir, self.name, self._config(), self.label, self.seed)
        if source is not None and source[1] is not None and source[1].metrics.is_file():
            shutil.copyfile(source[1].metrics, run.metrics)
        return run

    def _log_start(self, log: RunLog) -> None:
        """Records config, split and size before the first round."""
        facts: dict[str, Any] = {"parameters": self.vector.numel}
        if hasattr(self.datamodule, "split_summary"):
            facts["split"] = self.datamodule.split_summary()
        log.log_config({**self._config(), **facts})
        counts = self.datamodule.class_counts() if hasattr(self.datamodule, "class_counts") else None
        if self.run is not None and log.loggers and counts is not None:
            from lightning_fed.data import split_figure

            figure = split_figure(counts)
            figure.savefig(self.run.path / "split.png")
            log.log_figure("split", figure)

    def _report_end(self, signum: int | None) -> None:
        """Says where a finished run lies, or how to resume one that a signal stopped."""
        if signum is None or self.round >= self.max_rounds:
            if self.run is not None:
                shown = [f"{k} {v:.4g}" for k, v in sorted(self.metrics.progress_bar.items())]
                rank_zero_info(f"{self.round} rounds in {self.run.path}: {', '.join(shown) or 'done'}")
            return
        self.interrupted = int(signum)
        self.state.status = TrainerStatus.INTERRUPTED
        config = None if self.run is None else self.run.path / "config.yaml"
        if config is not None and config.is_file():
            resume = f"lightning-fed fit --config {config} --ckpt_path last"
        else:
            resume = "fit(model, datamodule, ckpt_path='last')"
        self.stop_message = f"Stopped by {signal.Signals(signum).name} after round {self.round}; resume with: {resume}"
        if self.run_config is None and self.is_global_zero:
            sys.stderr.write(self.stop_message + "\n")
