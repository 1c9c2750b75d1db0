"""Callbacks that come with the trainer: checkpoints and progress."""

from lightning_fed.callbacks.checkpoint import FederatedCheckpoint
from lightning_fed.callbacks.progress import FederatedProgressBar

__all__ = ["FederatedCheckpoint", "FederatedProgressBar"]
