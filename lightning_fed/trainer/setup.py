"""The life of one call of the trainer: attach, find a checkpoint, set up, record, take down."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_fed.client_algorithms import ClientAlgorithm
from lightning_fed.core.buffers import GlobalBuffers
from lightning_fed.core.client_states import ClientStates
from lightning_fed.core.optimizer.local import LocalOptimizer
from lightning_fed.core.recorder import LoggedMetrics
from lightning_fed.core.seeding import run_seed
from lightning_fed.core.updates import Client
from lightning_fed.core.vector import ParameterVector
from lightning_fed.distributed.consistency import expect_same_data, share_model
from lightning_fed.distributed.logs import sync_metrics
from lightning_fed.errors import FederatedError
from lightning_fed.runs.checkpoints import read_checkpoint, records_of_checkpoints
from lightning_fed.sampling import cohort_size
from lightning_fed.trainer.bookkeeping import RunKeeping
from lightning_fed.trainer.callback_order import add_module_callbacks
from lightning_fed.trainer.checkpointing import load_weights, restore_state
from lightning_fed.trainer.costs import no_totals
from lightning_fed.trainer.evaluation import named_loaders
from lightning_fed.trainer.fabric import announce_device, launch, move_to_device
from lightning_fed.trainer.options import TrainerOptions

if TYPE_CHECKING:
    from lightning_fed.engines.start_gradients import StartGradients

__all__ = ["TrainerSession"]


class TrainerSession(RunKeeping):
    """What ``fit``, ``validate``, ``test`` and ``predict`` share.

    Attributes:
        weights: The global vector w, shape (d,), float32 at least, on the device.
        vector: The live module's flat vector, while ``fit`` runs.
        buffers: The global model's buffers, while ``fit`` runs.
        client_states: What clients remember between their rounds, while ``fit`` runs.
        client: The client that trains now.
        origin: The live weights that stand for w while a client trains, from which its update is measured, shape (d,).
        displacement: Where set, gradients are taken at the live weights less this vector, shape (d,).
        start_gradients: Gradients at w over the clients' full data, where a part asked for them.
        round_metrics: Scalars of the current round by name.
        resumed: Whether this ``fit`` goes on from a checkpoint.
        validated: Whether the current round has been validated.
        totals: Counts over the run: samples seen, gradients computed, communication rounds, bytes each way.
        source: The clients' batches, on the device.
        cohort_size: Clients drawn in a round.
        engine_choice: The engine in use, why, and how many clients it trains at once; None before the first round.
    """

    clients_per_round: int | float
    check_test_every_n_rounds: int | None
    local_schedule: Literal["restart", "continue"]
    memory_format: Literal["preserve", "channels_last"]
    client_state_location: Literal["device", "host", "disk"]
    options: TrainerOptions

    weights: Tensor
    origin: Tensor
    displacement: Tensor | None
    start_gradients: StartGradients
    buffers: GlobalBuffers
    client_states: ClientStates
    source: Any
    cohort_size: int

    def __init__(self) -> None:
        super().__init__()
        self.val_loaders: dict[str, Any] = {}
        self.test_loaders: dict[str, Any] = {}
        self.resumed = False
        self.engine_choice: dict[str, Any] | None = None
        self.reset_position()

    def reset_position(self) -> None:
        """Goes back to round 0 with nothing counted."""
        self.round = self.finished_round = self.steps_before_round = self.local_step = 0
        self.client: Client | None = None
        self.metrics = LoggedMetrics({}, {}, {})
        self.round_metrics: dict[str, float] = {}
        self.validated = False
        self.totals = no_totals()
        self.displacement = self.engine_choice = None

    def _set_up_evaluation(self, name: str, ckpt_path: str | None, weights: str | None) -> dict[str, Any]:
        """Sets up for validate, test or predict; returns its data sets by name."""
        model, option = self._module(), "--weights"
        if ckpt_path is not None:
            if weights is not None:  # they name the run that started from them
                self.initial_weights = weights
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
        move_to_device(self.fabric, model)
        if weights is not None:
            load_weights(model, read_checkpoint(Path(weights), option), weights, option)
        share_model(self.processes, model)
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
        self.seed = run_seed() if self.options.seed is None else self.options.seed
        self.state.fn, self.state.status = fn, TrainerStatus.RUNNING
        self.state.stage = RunningStage.TRAINING if fn == TrainerFn.FITTING else RunningStage(fn.value)
        self.interrupted, self.stop_message, self.should_stop = None, "", False
        launch(self.fabric)
        model.trainer = self  # type: ignore[assignment]  # stands in for Lightning's Trainer
        if datamodule is not None:
            datamodule.trainer = self  # type: ignore[assignment]  # the same
        try:
            self.callbacks = add_module_callbacks(self.callbacks, model)
            yield
            self.processes.exchange(None, "end")
            self.state.status = TrainerStatus.FINISHED
        except KeyboardInterrupt as interrupt:
            self.state.status = TrainerStatus.INTERRUPTED
            self.processes.tell(interrupt)
            if fn != TrainerFn.FITTING:  # there is a result to return, and none
                raise
            self._report_end(signal.SIGINT)
        except BaseException as error:
            self.state.status = TrainerStatus.INTERRUPTED
            self.processes.tell(error)
            for callback in self.callbacks:
                callback.on_exception(self, model, error)  # type: ignore[arg-type]  # the same
            if datamodule is not None:
                datamodule.on_exception(error)
            raise
        finally:
            stage = "fit" if fn == TrainerFn.FITTING else fn.value
            if datamodule is not None:
                datamodule.teardown(stage)
            self.call("teardown", stage)
            if "client_states" in vars(self):
                self.client_states.close()
                del self.client_states
            if "vector" in vars(self):
                self.vector.release()
                del self.vector

    def _set_up_data(self, stage: str) -> None:
        """Prepares the data; before a run folder is made, so that a mistake in it leaves none behind."""
        for part in (self.datamodule, self._module()):  # one process of a machine prepares for all that run there
            if self.is_global_zero or (self.local_rank == 0 and part.prepare_data_per_node):
                part.prepare_data()
        self.processes.exchange(None, "data")
        self.datamodule.setup(stage)
        if stage == "fit":
            self.source = self.datamodule.train_source().to(self.fabric.device)
            self.cohort_size = cohort_size(self.clients_per_round, len(self.source.sizes))
            self.aggregator.check_cohort(self.cohort_size)
            expect_same_data(self.processes, self.seed, self.source.sizes, getattr(self.datamodule, "split_hash", None))

    def _set_up(self, stage: str) -> None:
        """Calls every ``setup`` after that of the data, in Lightning's order."""
        model = self._module()
        announce_device(self.fabric, model)
        for callback in self.callbacks:
            callback.setup(self, model, stage)  # type: ignore[arg-type]  # stands in for Lightning's Trainer
        model.setup(stage)
        model.configure_model()
        sync_metrics(self.processes, model)

    def _set_up_training(self, weights: str | None, checkpoint: dict[str, Any] | None, source: str) -> None:
        """Builds the global vector, buffers and local optimizer, fresh or from a checkpoint."""
        model = self._module()
        move_to_device(self.fabric, model)  # first: a checkpoint may hold more than the module's precision did
        if weights is not None and checkpoint is None:
            load_weights(model, read_checkpoint(Path(weights), "--weights"), weights, "--weights")
        if checkpoint is not None:
            load_weights(model, checkpoint, source, "--ckpt_path")
        self.reset_position()
        self.resumed = checkpoint is not None
        share_model(self.processes, model)
        if self.memory_format == "channels_last":
            model.to(memory_format=torch.channels_last)
        self.local_optimizer = LocalOptimizer(model, restart=self.local_schedule == "restart")
        self.strategy._lightning_optimizers = self.optimizers  # type: ignore[attr-defined]  # `self.optimizers()`
        self.vector = ParameterVector(model)
        wide = torch.promote_types(self.vector.dtype, torch.float32)
        self.weights = self.vector.data.to(wide, copy=True)
        self.buffers = GlobalBuffers(model, self.aggregator.buffers)
        self._set_up_client_states()
        has_validation = is_overridden("validation_step", model)
        self.val_loaders = named_loaders(self.datamodule.val_dataloader()) if has_validation else {}
        in_between = self.check_test_every_n_rounds is not None
        self.test_loaders = named_loaders(self.datamodule.test_dataloader()) if in_between else {}
        for callback in self.callbacks:
            if isinstance(callback, ClientAlgorithm):
                callback.check(self)  # type: ignore[arg-type]  # a session is only ever a trainer
        if checkpoint is not None:
            restore_state(self, checkpoint, source)
            self.load_global_model()

    def _set_up_client_states(self) -> None:
        """Makes the store of client state, in the run's folder if checkpoints are made there."""
        keeps = self.run is not None and self.checkpoint_callback is not None
        self.client_states = ClientStates(
            self.client_state_location,
            self.weights,
            self.run.path if self.run is not None else None,
            records_of_checkpoints(self.run) if self.run is not None and keeps else None,
        )

    def load_global_model(self) -> None:
        """Copies the global vector and buffers into the module."""
        self.vector.refresh()
        self.vector.data.copy_(self.weights)
        self.buffers.load()
