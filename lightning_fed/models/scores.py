"""The scores of a user's own classifier for a batch."""

from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.errors import FederatedError

__all__ = ["class_scores"]


def class_scores(module: LightningModule, batch: Any, advice: str = "") -> tuple[Tensor, Tensor]:
    """Returns a module's scores for a batch (inputs, labels), shape (B, C), and the labels, shape (B,).

    Args:
        module: The module.
        batch: Inputs and labels; ``forward`` gets the inputs.
        advice: What to do if the model has diverged; the end of that message.
    """
    expected = (
        f"Expected {type(module).__name__} to be a classifier, whose `forward` returns finite scores of shape (B, C) "
        "for the inputs of a batch (inputs, labels), labels from 0 to C - 1"
    )
    if not isinstance(batch, (list, tuple)) or len(batch) != 2:
        raise FederatedError(f"{expected}, got a batch that is {_shown(batch)}.")
    scores, labels = module(batch[0]), batch[1]
    integers = isinstance(labels, Tensor) and not labels.is_floating_point() and labels.ndim == 1
    several = isinstance(scores, Tensor) and scores.ndim == 2 and scores.shape[1] > 1
    if not integers or not several or len(scores) != len(labels):
        raise FederatedError(f"{expected}, got {_shown(scores)} for labels that are {_shown(labels)}.")
    if not scores.isfinite().all():
        raise FederatedError(f"{expected}, got NaN or infinity: the model has diverged{advice}.")
    if not ((labels >= 0) & (labels < scores.shape[1])).all():
        ends = f"{labels.min()} to {labels.max()}"
        raise FederatedError(f"{expected}, got labels from {ends} for {scores.shape[1]} scores.")
    return scores, labels


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    parts = f" of {len(value)}" if isinstance(value, (list, tuple)) else ""
    return f"a {type(value).__name__}{parts}"
