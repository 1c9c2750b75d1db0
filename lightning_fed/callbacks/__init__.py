"""Callbacks that come with the trainer: checkpoints, progress, and what happens to updates on their way."""

from lightning_fed.callbacks.checkpoint import FederatedCheckpoint
from lightning_fed.callbacks.clip_updates import ClipUpdates
from lightning_fed.callbacks.payload import Payload
from lightning_fed.callbacks.progress import FederatedProgressBar

__all__ = [
    "ClipUpdates",
    "FederatedCheckpoint",
    "FederatedProgressBar",
    "Payload",
]
