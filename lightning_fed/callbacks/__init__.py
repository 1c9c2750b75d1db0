"""Callbacks that come with the trainer: checkpoints, progress, and changes to updates before they reach the server."""

from lightning_fed.callbacks.checkpoint import FederatedCheckpoint
from lightning_fed.callbacks.frozen import FrozenParameters
from lightning_fed.callbacks.payload import ClipUpdates, Payload
from lightning_fed.callbacks.privacy import CentralDP, LocalDP
from lightning_fed.callbacks.progress import FederatedProgressBar

__all__ = [
    "CentralDP",
    "ClipUpdates",
    "FederatedCheckpoint",
    "FederatedProgressBar",
    "FrozenParameters",
    "LocalDP",
    "Payload",
]
