"""What a LightningModule and Lightning's own callbacks read from a trainer, under Lightning's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.strategy import Strategy
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.metrics import LoggedMetrics
from lightning_fed.optimizers import LocalOptimizer

__all__ = ["TrainerFacade"]


class TrainerFacade:
    """State and read-only properties of a trainer; a round is an epoch here."""

    fabric: Fabric
    callbacks: list[Callback]
    max_rounds: int
    max_time: Any
    check_val_every_n_rounds: int
    gradient_clip_val: float | None
    gradient_clip_algorithm: Literal["norm", "value"]
    accumulate_grad_batches: int
    fast_dev_run: bool | int
    seed: int

    def __init__(self) -> None:
        self.state = TrainerState()
        self.should_stop = False
        self.round = 0
        self.loggers: list[Logger] = []
        self.log_dir: str | None = None
        self.lightning_module: LightningModule | None = None
        self.datamodule: Any = None
        self.local_optimizer: LocalOptimizer | None = None
        self.metrics = LoggedMetrics({}, {}, {})
        self.steps_before_round = 0
        self.local_step = 0
        self.run_config: dict[str, Any] | None = None
        self.interrupted: int | None = None
        self.stop_message = ""

    # Position

    @property
    def current_epoch(self) -> int:
        """Index of the round, 0 before training."""
        return self.round

    @property
    def global_step(self) -> int:
        """Local steps of the longest client of each finished round, summed, and those of the current client."""
        return self.steps_before_round + self.local_step

    @property
    def max_epochs(self) -> int:
        """The number of rounds."""
        return self.max_rounds

    @property
    def max_steps(self) -> int:
        """Always -1: a run's length is given in rounds."""
        return -1

    @property
    def check_val_every_n_epoch(self) -> int:
        """Rounds between validations."""
        return self.check_val_every_n_rounds

    @property
    def val_check_interval(self) -> float:
        """Always 1.0: validation happens after a round, never within one."""
        return 1.0

    @property
    def training(self) -> bool:
        """Whether clients are being trained."""
        return self.state.stage == RunningStage.TRAINING

    @property
    def validating(self) -> bool:
        """Whether a validation is running, within ``fit`` or by itself."""
        return self.state.stage == RunningStage.VALIDATING

    @property
    def testing(self) -> bool:
        """Whether a test is running."""
        return self.state.stage == RunningStage.TESTING

    @property
    def predicting(self) -> bool:
        """Whether predictions are being made."""
        return self.state.stage == RunningStage.PREDICTING

    @property
    def sanity_checking(self) -> bool:
        """Always False: round 0 is a real evaluation, not a check."""
        return False

    @property
    def interrupted_or_failed(self) -> bool:
        """Whether the last call ended early, by a signal or an error."""
        return self.state.status == TrainerStatus.INTERRUPTED

    # Processes and precision

    @property
    def strategy(self) -> Strategy:
        """Fabric's strategy."""
        return self.fabric.strategy

    @property
    def is_global_zero(self) -> bool:
        """Whether this process writes files."""
        return self.fabric.is_global_zero

    @property
    def global_rank(self) -> int:
        """Index of this process over all nodes."""
        return self.fabric.global_rank

    @property
    def local_rank(self) -> int:
        """Index of this process on its node."""
        return self.fabric.local_rank

    @property
    def node_rank(self) -> int:
        """Index of this node."""
        return self.fabric.node_rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.fabric.world_size

    @property
    def num_devices(self) -> int:
        """Devices used on this node."""
        return 1

    @property
    def precision(self) -> str:
        """Precision by Lightning's name, such as ``bf16-mixed``."""
        return str(self.fabric.strategy.precision.precision)

    @property
    def precision_plugin(self) -> Precision:
        """Serves ``LightningModule.clip_gradients``."""
        return Precision()

    # Metrics, loggers, optimizers

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The newest value of every metric, for callbacks that monitor one."""
        return {name: torch.tensor(value) for name, value in self.metrics.callback.items()}

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The newest value of every metric that was sent to the loggers."""
        return {name: torch.tensor(value) for name, value in self.metrics.logged.items()}

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The newest value of every metric logged with ``prog_bar``."""
        return self.metrics.progress_bar

    @property
    def logger(self) -> Logger | None:
        """The first logger, None if there is none."""
        return self.loggers[0] if self.loggers else None

    @property
    def optimizers(self) -> list[Optimizer]:
        """The one local optimizer, in a list."""
        return [self.local_optimizer.optimizer] if self.local_optimizer is not None else []

    @property
    def lr_scheduler_configs(self) -> list[LRSchedulerConfig]:
        """The module's learning-rate schedules."""
        if self.local_optimizer is None:
            return []
        return [*self.local_optimizer.step_schedulers, *self.local_optimizer.round_schedulers]

    @property
    def model(self) -> LightningModule | None:
        """The module."""
        return self.lightning_module

    @property
    def progress_bar_callback(self) -> Callback | None:
        """The progress bar, which ``LightningModule.print`` writes above."""
        return next((cb for cb in self.callbacks if hasattr(cb, "is_enabled") and hasattr(cb, "print")), None)

    # Calling hooks

    def call(self, hook: str, *args: Any, module: bool = True) -> None:
        """Calls a hook on every callback in the trainer's order, then on the module if it has one of that name."""
        for callback in self.callbacks:
            method: Callable[..., Any] | None = getattr(callback, hook, None)
            if method is not None:
                method(self, self.lightning_module, *args)
        if module:
            own: Callable[..., Any] | None = getattr(self.lightning_module, hook, None)
            if own is not None:
                own(*args)

    def enter(self, fn: TrainerFn, stage: RunningStage) -> None:
        """Records what the trainer does now."""
        self.state.fn = fn
        self.state.stage = stage
