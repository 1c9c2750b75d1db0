"""Callbacks that come with the trainer: checkpoints, progress, and changes to updates before they reach the server."""

from lightning_fed.callbacks.checkpoint import FederatedCheckpoint
from lightning_fed.callbacks.compression import QSGD, RandomK, TopK
from lightning_fed.callbacks.frozen import FrozenParameters
from lightning_fed.callbacks.payload import ClipUpdates, Payload
from lightning_fed.callbacks.progress import FederatedProgressBar

__all__ = [
    "QSGD",
    "ClipUpdates",
    "FederatedCheckpoint",
    "FederatedProgressBar",
    "FrozenParameters",
    "Payload",
    "RandomK",
    "TopK",
]
