"""Calls hooks for batches and epochs of Lightning's own callbacks once a round, where this makes sense."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_fed.core.files import WriteError
from lightning_fed.core.hooks import FederatedCallback, is_stock
from lightning_fed.core.updates import ReducedUpdate
from lightning_fed.errors import FederatedError

__all__ = ["StockCallbacks", "unfrozen"]

_ACCELERATORS: dict[str, Any] = {"cpu": CPUAccelerator, "cuda": CUDAAccelerator, "mps": MPSAccelerator}


class _Columns:
    """A logger that turns what a callback sends to loggers into columns of the round's row."""

    group_separator = "/"

    def __init__(self, module: LightningModule) -> None:
        self._module = module

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self._module.log_dict({name: float(value) for name, value in metrics.items()}, batch_size=1)


class _RoundView:
    """The trainer as Lightning's callbacks read it after a round, their epoch; ``instead`` replaces attributes."""

    def __init__(self, trainer: Any, **instead: Any) -> None:
        self._trainer = trainer
        self.callback_metrics = {**trainer.callback_metrics, "round": torch.tensor(trainer.round)}
        self.num_val_batches = [1] if trainer.val_loaders else [0]
        self.ckpt_path = getattr(trainer, "ckpt_path", None)
        self.fit_loop = SimpleNamespace(
            epoch_loop=SimpleNamespace(
                _batches_that_stepped=trainer.round, val_loop=SimpleNamespace(_has_run=trainer.validated)
            )
        )
        self._logger_connector = SimpleNamespace(should_update_logs=True)
        vars(self).update(instead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


class StockCallbacks(FederatedCallback):
    """Calls once a round the hooks of Lightning's own callbacks that ``hooks.ONCE_A_ROUND`` skips.

    ModelCheckpoint saves between two rounds. Monitors add columns to the round's row. WeightAveraging averages global
    models, with a round as a step. Finetuning unfreezes weights for the clients of all later rounds.
    """

    def __init__(self) -> None:
        self._as_given: dict[int, dict[str, Any]] = {}

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Gives ModelCheckpoint the run's folder, unless it has one of its own, and sets up the other callbacks."""
        for callback in _of(trainer, "ModelCheckpoint"):
            if stage == "fit":  # reset, so that the best values of an earlier run are forgotten
                given = self._as_given.setdefault(id(callback), deepcopy(vars(callback)))
                vars(callback).update(deepcopy(given))
            run = trainer.run
            root = trainer.default_root_dir if run is None else run.path
            callback.setup(_RoundView(trainer, loggers=[], default_root_dir=str(root)), pl_module, stage)
            shared = run is not None and str(callback.dirpath) == str(run.checkpoints)
            if shared and callback.save_last and callback.CHECKPOINT_NAME_LAST == "last":
                callback.last_model_path = str(run.checkpoints / "last.ckpt")  # the trainer writes this file too
        for callback in _of(trainer, "DeviceStatsMonitor"):
            try:
                callback.setup(_RoundView(trainer, loggers=[_Columns(pl_module)]), pl_module, stage)
            except ModuleNotFoundError as error:
                raise FederatedError(f"DeviceStatsMonitor cannot start: {' '.join(str(error).split())}") from error
        for callback in _of(trainer, "BaseFinetuning") if stage == "fit" else ():
            backbone = getattr(pl_module, "backbone", None)
            if is_stock(callback, "BackboneFinetuning") and not isinstance(backbone, nn.Module):
                raise FederatedError(
                    f"Expected {type(pl_module).__name__} to have a module `backbone` for {type(callback).__name__} to "
                    f"freeze and unfreeze, got {type(backbone).__name__}: give that part of the network this name."
                )
            callback.setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        for callback in _of(trainer, "LearningRateMonitor"):
            callback.on_train_start(self._monitoring(trainer, pl_module))
        for callback in _of(trainer, "WeightAveraging"):
            if not trainer.resumed:  # its copy was made before weights were loaded
                callback._average_model.module.load_state_dict(pl_module.state_dict())

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        view = self._monitoring(trainer, pl_module)
        for callback in _of(trainer, "BaseFinetuning"):
            callback.on_train_epoch_start(view, pl_module)
        for callback in _of(trainer, "LearningRateMonitor"):
            callback.on_train_epoch_start(view)
            callback.on_train_batch_start(view)
        for callback in _of(trainer, "DeviceStatsMonitor"):
            callback.on_train_batch_start(view, pl_module, None, 0)

    def on_after_server_step(self, trainer: Any, pl_module: LightningModule, update: ReducedUpdate) -> None:
        view = self._monitoring(trainer, pl_module)
        for callback in _of(trainer, "WeightAveraging"):
            callback.on_train_batch_end(view, pl_module, None, None, 0)
        for callback in _of(trainer, "DeviceStatsMonitor"):
            callback.on_train_batch_end(view, pl_module, None, None, 0)

    def on_save_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Saves which parameters are trained now, if finetuning changes that."""
        if _of(trainer, "BaseFinetuning"):
            trained = [name for name, parameter in pl_module.named_parameters() if parameter.requires_grad]
            checkpoint["federated"]["trained"] = trained

    def on_load_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Freezes and unfreezes parameters as they were when the checkpoint was written."""
        if not _of(trainer, "BaseFinetuning"):
            return
        trained = set(checkpoint["federated"]["trained"])
        for name, parameter in pl_module.named_parameters():
            parameter.requires_grad_(name in trained)
        for part in pl_module.modules():
            if isinstance(part, _BatchNorm) and part.weight is not None and part.weight.requires_grad:
                BaseFinetuning.make_trainable(part)  # unfreezes its statistics too

    def save(self, trainer: Any, pl_module: LightningModule) -> None:
        """Lets every ModelCheckpoint save what is due after the current round.

        Raises:
            FederatedError: If one monitors a metric that is not logged.
            WriteError: If the system refuses a write; that callback then keeps its state from before.
        """
        for callback in _of(trainer, "ModelCheckpoint"):
            view, before = _RoundView(trainer), deepcopy(vars(callback))
            try:
                if trainer.validated:
                    callback.on_validation_end(view, pl_module)
                callback.on_train_epoch_end(view, pl_module)
            except MisconfigurationException as error:
                raise FederatedError(f"ModelCheckpoint cannot go on: {' '.join(str(error).split())}") from error
            except WriteError:
                vars(callback).update(before)
                raise

    def _monitoring(self, trainer: Any, pl_module: LightningModule) -> _RoundView:
        accelerator = _ACCELERATORS[trainer.strategy.root_device.type]()
        return _RoundView(trainer, loggers=[_Columns(pl_module)], global_step=trainer.round, accelerator=accelerator)


def _of(trainer: Any, kind: str) -> list[Any]:
    return [callback for callback in trainer.callbacks if is_stock(callback, kind)]


@contextmanager
def unfrozen(callbacks: Iterable[Any], module: nn.Module) -> Iterator[None]:
    """Lets parameters that finetuning callbacks freeze now and unfreeze later require gradients within the block."""
    finetuning = [callback for callback in callbacks if is_stock(callback, "BaseFinetuning")]
    before = [(p, p.requires_grad) for p in module.parameters() if p.is_floating_point()] if finetuning else []
    for parameter, _ in before:
        parameter.requires_grad_(True)
    for callback in finetuning:
        callback.freeze_before_training(module)
    for parameter, trained in before:
        parameter.requires_grad_(trained or not parameter.requires_grad)
    try:
        yield
    finally:
        for parameter, trained in before:
            parameter.requires_grad_(trained)
