"""Bounds how far a single client can move the model."""

import torch
from lightning.pytorch import LightningModule

from lightning_fed.callbacks.payload import Payload
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import Update
from lightning_fed.errors import expect_number
from lightning_fed.functional.geometry import wide_dtype

__all__ = ["ClipUpdates"]


class ClipUpdates(Payload):
    """Scales down every client's update that is longer than a bound: δ_i <- δ_i min(1, C / ‖δ_i‖).

    Works with any aggregator and mask; they get the clipped updates. Shorter updates stay the same, bit for bit. Logs
    ``clip/share``, the share of clients that were clipped, and ``clip/norm``, the mean length of updates before.

    Args:
        max_norm: C, above 0, in the units of the model's parameters.
    """

    bounds_length = True

    def __init__(self, max_norm: float) -> None:
        self.max_norm = expect_number("max_norm", max_norm, above=0, of="ClipUpdates")

    def encode(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        """Clips one update in place; nothing is read from the device."""
        norm = torch.linalg.vector_norm(update.delta, dtype=wide_dtype(update.delta))
        update.delta.mul_((self.max_norm / norm).clamp(max=1.0))
        pl_module.log_dict({"clip/share": (norm > self.max_norm).to(norm.dtype), "clip/norm": norm}, batch_size=1)
