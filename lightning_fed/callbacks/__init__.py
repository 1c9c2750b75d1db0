"""Callbacks that come with the trainer: checkpoints, progress, diagnostics, and changes to updates on their way."""

from lightning_fed.callbacks import diagnostics
from lightning_fed.callbacks.checkpoint import FederatedCheckpoint
from lightning_fed.callbacks.diagnostics import *  # noqa: F403
from lightning_fed.callbacks.frozen import FrozenParameters
from lightning_fed.callbacks.payload import ClipUpdates, Payload
from lightning_fed.callbacks.progress import FederatedProgressBar

__all__ = ["ClipUpdates", "FederatedCheckpoint", "FederatedProgressBar", "FrozenParameters", "Payload"]
__all__ += diagnostics.__all__
