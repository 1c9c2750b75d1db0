"""Callbacks that come with the trainer: checkpoints, progress, and clipping of updates."""

from lightning_fed.callbacks.checkpoint import FederatedCheckpoint
from lightning_fed.callbacks.clip_updates import ClipUpdates
from lightning_fed.callbacks.progress import FederatedProgressBar

__all__ = [
    "ClipUpdates",
    "FederatedCheckpoint",
    "FederatedProgressBar",
]
