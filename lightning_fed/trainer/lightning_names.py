"""What a trainer says under Lightning's names about its length, its stage, its processes and its precision."""

from __future__ import annotations

from typing import Any, Literal

from lightning.fabric import Fabric
from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.strategies.strategy import Strategy
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import RunningStage, TrainerState, TrainerStatus
from torch import Tensor

from lightning_fed.distributed.processes import Processes
from lightning_fed.distributed.strategy import ClientsStrategy
from lightning_fed.errors import FederatedError

__all__ = ["LightningNames"]

_ALONE = Processes()


class LightningNames:
    """Read-only properties that LightningModules and callbacks read; a round is an epoch here."""

    fabric: Fabric
    callbacks: list[Callback]
    source: Any
    state: TrainerState
    max_rounds: int
    local_epochs: int | None
    local_steps: int | None
    local_schedule: Literal["restart", "continue"]
    check_val_every_n_rounds: int
    accumulate_grad_batches: int
    barebones = False

    # Length

    @property
    def max_epochs(self) -> int:
        """The number of rounds."""
        return self.max_rounds

    @property
    def max_steps(self) -> int:
        """Always -1: a run's length is given in rounds."""
        return -1

    @property
    def min_epochs(self) -> int:
        """Always 0: a callback may stop a run at any round."""
        return 0

    @property
    def num_training_batches(self) -> int:
        """Batches in one local epoch of the client with the most samples."""
        return -(-int(max(self.source.sizes)) // int(self.source.batch_size))

    @property
    def estimated_stepping_batches(self) -> int:
        """Steps that a schedule with interval ``step`` takes at most.

        Those of the client with the most samples in one round, as schedules restart then; in all rounds if
        ``local_schedule`` is ``continue``.
        """
        steps = self.local_steps
        if steps is None:
            steps = (self.local_epochs or 1) * -(-self.num_training_batches // self.accumulate_grad_batches)
        return steps * self.max_rounds if self.local_schedule == "continue" else steps

    @property
    def check_val_every_n_epoch(self) -> int:
        """Rounds between validations."""
        return self.check_val_every_n_rounds

    @property
    def val_check_interval(self) -> float:
        """Always 1.0: validation happens after a round, never within one."""
        return 1.0

    # Stage

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
    def evaluating(self) -> bool:
        """Whether a validation or a test is running."""
        return self.validating or self.testing

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
    def processes(self) -> Processes:
        """The processes that share the run."""
        strategy = self.fabric.strategy
        return strategy.processes if isinstance(strategy, ClientsStrategy) else _ALONE

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        """Adds up over the processes what each has summed over its own clients, in place.

        To be called by all of them, in hooks that are called once in a round. With one process nothing is done.

        Args:
            tensor: Of the same shape and dtype on all.

        Returns:
            The tensor.
        """
        self.processes.sum(tensor, what="reduce_sum")
        return tensor

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
        """Devices used on this node, one for each process."""
        return int(getattr(self.fabric.strategy, "num_processes", 1))

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return int(getattr(self.fabric.strategy, "num_nodes", 1))

    @property
    def device_ids(self) -> list[int]:
        """Index of the device used on this node."""
        return [self.fabric.device.index or 0]

    @property
    def accelerator(self) -> Accelerator:
        """Fabric's accelerator."""
        return self.fabric.accelerator

    @property
    def precision(self) -> str:
        """Precision by Lightning's name, such as ``bf16-mixed``."""
        return str(self.fabric.strategy.precision.precision)

    @property
    def precision_plugin(self) -> Precision:
        """Serves ``LightningModule.clip_gradients``."""
        return Precision()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints once, whatever the number of processes."""
        self.fabric.print(*args, **kwargs)

    # Callbacks

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """Every EarlyStopping."""
        return [cb for cb in self.callbacks if isinstance(cb, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first EarlyStopping, None if there is none."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        """The callback that writes checkpoints, in a list."""
        return [cb for cb in self.callbacks if isinstance(cb, Checkpoint)]

    @property
    def checkpoint_callback(self) -> Checkpoint | None:
        """The callback that writes checkpoints, None if there is none."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def progress_bar_callback(self) -> Any:
        """The progress bar, which ``LightningModule.print`` writes above."""
        return next((cb for cb in self.callbacks if hasattr(cb, "is_enabled") and hasattr(cb, "print")), None)

    @property
    def _results(self) -> Any:
        """Where ``LightningModule.log`` ends up outside the hooks in which values are collected."""
        raise FederatedError(
            "Expected `self.log` only in steps and in the hooks of a round, a batch, a validation or a test, where "
            "Lightning takes it too: move it there, for example to `on_train_epoch_start`."
        )
