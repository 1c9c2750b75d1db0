"""Writes the ``last`` and ``best`` checkpoints of a run."""

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from torch import Tensor

from lightning_fed.core.files import WriteError
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.errors import FederatedError, expect_choice, expect_count
from lightning_fed.runs.statistics import Goal, goal_of

__all__ = ["FederatedCheckpoint"]

# The metrics tried, in this order, when no monitor is given; both spellings are common.
_USUAL = ("val/acc", "val_acc", "val/loss", "val_loss")


class FederatedCheckpoint(FederatedCallback, Checkpoint):
    """Writes ``checkpoints/last.ckpt`` every n rounds and ``checkpoints/best.ckpt`` by a monitored metric.

    Both are written atomically: if the process dies, no file is half-written. Lightning's ModelCheckpoint works too.

    Args:
        monitor: Name of a logged metric; by default that of a ModelCheckpoint in the same run, else the first of
            val/acc, val_acc, val/loss, val_loss that is logged.
        mode: Whether the smallest (``min``) or the largest value (``max``) is best; by default what a metric object
            says of itself, else what the name says: least for losses and errors, most for accuracies.
        every_n_rounds: Rounds between two writes of ``last``; it is always written after the final round.
    """

    def __init__(self, monitor: str | None = None, mode: Goal | None = None, every_n_rounds: int = 1) -> None:
        self.mode = expect_choice("mode", mode, ("min", "max"), of="FederatedCheckpoint", optional=True)
        self.every_n_rounds = expect_count("every_n_rounds", every_n_rounds, of="FederatedCheckpoint")
        self.monitor = monitor
        self._forget()

    def _forget(self) -> None:
        self._watched, self._mode = self.monitor, self.mode
        self.best_score: float | None = None
        self.best_round: int | None = None
        self.saved_round: int | None = None
        self._resumed_from: int | None = None
        self.best_model_path = self.last_model_path = ""

    @property
    def best_model_score(self) -> Tensor | None:
        """The best value so far, as in Lightning's ModelCheckpoint."""
        return None if self.best_score is None else torch.tensor(self.best_score)

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._forget()

    def save(self, trainer: Any, final: bool) -> None:
        """Writes the checkpoints that are due between two rounds; after the final round ``last`` always is.

        Raises:
            WriteError: If the system refuses a file; what was not written stays due.
        """
        # ``best`` first: a run that dies between the two writes resumes from an earlier ``last``, finds the same best
        # again and rewrites it. In the other order ``last`` would count ``best`` as written.
        before = self.best_score, self.best_round
        names = ["best"] if self._improved(trainer) else []
        if (final or trainer.round % self.every_n_rounds == 0) and self.saved_round != trainer.round:
            names.append("last")
        try:
            trainer.save_checkpoints(*names)
        except WriteError as error:
            if "best" not in {path.stem for path in error.written}:
                self.best_score, self.best_round = before
            raise
        if "last" in names:
            self.saved_round = trainer.round
        if trainer.run is not None:
            for name in names:
                setattr(self, f"{name}_model_path", str(trainer.run.checkpoints / f"{name}.ckpt"))

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Writes the model of the last finished round as ``last_good.ckpt`` if that round has no checkpoint."""
        if isinstance(exception, WriteError):  # the disk refuses writes
            return
        if trainer.finished_round not in (0, self.saved_round, self._resumed_from):
            trainer.save_last_good()

    def on_load_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remembers the round that a run resumes from: it already has a checkpoint."""
        self._resumed_from = trainer.round

    def _improved(self, trainer: Any) -> bool:
        """Returns whether this round's value is the best so far, and remembers it if so."""
        metrics = trainer.round_metrics
        if self._watched is None:
            stock = [cb for cb in trainer.callbacks if isinstance(cb, ModelCheckpoint)]
            asked: list[Any] = [(cb.monitor, cb.mode) for cb in stock if cb.monitor is not None]
            known = (*asked, *((name, None) for name in _USUAL))
            self._watched, self._mode = next((pair for pair in known if pair[0] in metrics), (None, None))
            if self._watched is None:
                return False
        if self._watched not in metrics:
            if self.monitor is not None and self.best_score is None and trainer.validated:
                raise FederatedError(
                    f"Expected the monitored metric {self.monitor!r} of FederatedCheckpoint to be logged, got only "
                    f"{', '.join(sorted(metrics))}: change its `monitor`."
                )
            return False
        value, said = metrics[self._watched], self._mode or trainer.metrics.goals.get(self._watched)
        self._mode = goal_of(self._watched, said, "mode` of `FederatedCheckpoint")
        better = self.best_score is None or (
            value > self.best_score if self._mode == "max" else value < self.best_score
        )
        if better and not math.isnan(value):
            self.best_score, self.best_round = value, trainer.round
            return True
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"monitor": self._watched, "mode": self._mode, "best": self.best_score, "round": self.best_round}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._watched, self._mode = state_dict["monitor"], state_dict["mode"]
        self.best_score, self.best_round = state_dict["best"], state_dict["round"]
