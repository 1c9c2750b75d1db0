"""What a LightningModule and Lightning's own callbacks read from a trainer, under Lightning's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.core.optimizer.local import LocalOptimizer
from lightning_fed.core.recorder import LoggedMetrics
from lightning_fed.errors import FederatedError
from lightning_fed.trainer.lightning_names import LightningNames

__all__ = ["TrainerFacade"]


class TrainerFacade(LightningNames):
    """State of a trainer, what it has logged and trains with, and how hooks are called."""

    max_time: Any
    gradient_clip_val: float | None
    gradient_clip_algorithm: Literal["norm", "value"] | None
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
        return self.local_optimizer.schedulers

    @property
    def model(self) -> LightningModule | None:
        """The module."""
        return self.lightning_module

    # Calling hooks

    def call(self, hook: str, *args: Any, module: bool = True, monitors: bool | None = None) -> None:
        """Calls a hook on every callback in the trainer's order, then on the module if it has one of that name.

        Args:
            hook: Name of the hook.
            *args: Its arguments after trainer and module.
            module: Whether to call it on the module.
            monitors: Only those callbacks that monitor a metric (True), only the others (False), or all.
        """
        for callback in self.callbacks:
            if monitors is not None and isinstance(callback, (EarlyStopping, Checkpoint)) != monitors:
                continue
            method: Callable[..., Any] | None = getattr(callback, hook, None)
            if method is not None:
                try:
                    method(self, self.lightning_module, *args)
                except RuntimeError as error:
                    if isinstance(callback, EarlyStopping):  # a monitor that nobody logs
                        raise FederatedError(f"EarlyStopping cannot go on: {' '.join(str(error).split())}") from error
                    raise
        if module:
            own: Callable[..., Any] | None = getattr(self.lightning_module, hook, None)
            if own is not None:
                own(*args)

    def enter(self, fn: TrainerFn, stage: RunningStage) -> None:
        """Records what the trainer does now."""
        self.state.fn = fn
        self.state.stage = stage
