"""The gradient of a client's loss over all its training data, shared by every method that asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.engines.local_step import loss_of
from lightning_fed.hooks import Client
from lightning_fed.metrics import MetricRecorder, recording
from lightning_fed.seeding import Purpose, seed_everywhere, seed_for
from lightning_fed.transfer import accepts

if TYPE_CHECKING:
    from lightning_fed.trainer import FederatedTrainer

__all__ = ["FullGradient"]


class FullGradient:
    """Computes ∇f_i and f_i at the live weights, f_i the mean loss of ``training_step`` over the client's samples.

    Nothing of it shows in the client's training: buffers are put back, logged values are dropped, and the random
    streams are those of a purpose of their own. Weight decay is no part of it.

    Args:
        trainer: The trainer, set up for ``fit``; its ``full_gradient_mode`` says whether the module is in eval mode.
        module: The resident module.
        source: The clients' batches.
        transfer: Brings a batch to device and precision, None if there is nothing to do.
    """

    def __init__(self, trainer: FederatedTrainer, module: LightningModule, source: Any, transfer: Any) -> None:
        self.trainer, self.module, self.source, self.transfer = trainer, module, source, transfer
        self.takes_batch_idx = accepts(module.training_step, "batch_idx", 2)

    def compute(self, client: Client, out: Tensor) -> Tensor:
        """Computes the gradient at the module's live weights.

        Args:
            client: The client.
            out: Receives ∇f_i, shape (d,).

        Returns:
            f_i, shape (), on the device.
        """
        trainer, vector, buffers = self.trainer, self.trainer.vector, self.trainer.buffers.live
        kept = buffers.copy()
        modes = {m: m.training for m in self.module.modules()}
        self.module.train(trainer.full_gradient_mode == "train")
        seed = seed_for(trainer.seed, Purpose.GRADIENT, client.round, client.id)
        seed_everywhere(seed)
        vector.zero_grad()
        with recording(self.module, MetricRecorder()):
            loss = self._accumulate(client, seed)
        out.copy_(vector.grad)
        vector.zero_grad()
        for m, training in modes.items():
            m.training = training
        buffers.load(kept)
        return loss

    def _accumulate(self, client: Client, seed: int) -> Tensor:
        device = self.trainer.vector.device
        total = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        order = torch.arange(client.num_samples)
        for index, batch in enumerate(self.source.batches(client.id, order, seed)):
            share = min(self.source.batch_size, client.num_samples - index * self.source.batch_size)
            if self.transfer is not None:
                batch = self.transfer(batch, 0)
            with self.trainer.fabric.autocast():
                output = self.module.training_step(*((batch, index) if self.takes_batch_idx else (batch,)))
            loss = loss_of(output, self.module) * (share / client.num_samples)
            self.module.backward(loss)
            total += loss.detach()
        self.trainer.vector.hide_missing_gradients()  # and collect those that the user's code assigned
        return total
