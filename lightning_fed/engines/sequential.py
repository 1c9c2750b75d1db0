"""Trains the clients of a cohort one after another on one resident module and optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_fed.engines.full_gradient import FullGradient
from lightning_fed.engines.local_step import LocalStep, overriding_hooks
from lightning_fed.errors import FederatedError
from lightning_fed.functional.distance import optimizer_distance
from lightning_fed.hooks import Client, Cohort, Update
from lightning_fed.metrics import MetricRecorder
from lightning_fed.reduction import Need, ReducedUpdate, RoundReducer
from lightning_fed.seeding import Purpose, generator_for, seed_everywhere, seed_for
from lightning_fed.transfer import batch_transfer, overrides

if TYPE_CHECKING:
    from lightning_fed.data import BatchSource
    from lightning_fed.trainer import FederatedTrainer

__all__ = ["SequentialEngine"]


class SequentialEngine:
    """Loads the global model by one copy, runs local steps, and reads the update by one subtraction.

    Args:
        trainer: The trainer, set up for ``fit``.
        module: The resident module.
        source: The clients' batches.
        reducer: Takes every update in ascending order of client id.
        recorder: Takes what training logs.
    """

    def __init__(
        self,
        trainer: FederatedTrainer,
        module: LightningModule,
        source: BatchSource,
        reducer: RoundReducer,
        recorder: MetricRecorder,
    ) -> None:
        assert trainer.local_optimizer is not None
        self.trainer, self.module, self.source = trainer, module, source
        self.reducer, self.recorder = reducer, recorder
        self.optimizer = trainer.local_optimizer
        self.step = LocalStep(trainer, module, recorder)
        self.delta = torch.empty_like(trainer.weights)
        self.transfer = batch_transfer(trainer.fabric, module, trainer.datamodule, resident=True)
        self.client_end_hooks = overriding_hooks(trainer, "on_client_end")
        self.step_start_hooks = overriding_hooks(trainer, "on_local_step_start")
        self.batch_start_hooks = overriding_hooks(trainer, "on_train_batch_start")
        self.batch_end_hooks = overriding_hooks(trainer, "on_train_batch_end")
        self.module_batch_start = module.on_train_batch_start if overrides(module, "on_train_batch_start") else None
        self.module_batch_end = module.on_train_batch_end if overrides(module, "on_train_batch_end") else None
        self.max_steps = 0
        self.samples = 0
        self.diverged: list[int] = []
        self._set_up_gradients()

    def _set_up_gradients(self) -> None:
        """Prepares what the aggregator asks for beyond the updates."""
        aggregator = self.trainer.aggregator
        asked = bool(aggregator.all_needs & Need.ANY_GRADIENT)
        self.gradient_at = aggregator.gradient_at if asked else None
        self.gradient = torch.empty_like(self.delta) if asked else None
        self.full_gradient = FullGradient(self.trainer, self.module, self.source, self.transfer)
        if self.gradient_at == "last_step":
            self.step.last_gradient = self.gradient
        self.needs_distance = Need.NORMALIZED_MEAN in aggregator.all_needs
        self.step_options: list[tuple[float, float]] = []

    def train(self, cohort: Cohort) -> ReducedUpdate:
        """Trains every client of the cohort and reduces their updates.

        Args:
            cohort: The round's clients, in ascending order of id.

        Returns:
            The reduced update; no client in it if none took a step.
        """
        trainer, aggregator = self.trainer, self.trainer.aggregator
        self.reducer.reset(len(cohort.clients))
        self.cohort_size = len(cohort.clients)
        # A buffer that holds infinity by design, such as an attention mask, says nothing about divergence.
        self.finite_buffers = [
            name for name, b in trainer.buffers.values.items() if b.is_floating_point() and bool(b.isfinite().all())
        ]
        self.max_steps = self.samples = 0
        self.optimizer.start_round()
        # The live model's dtype can be narrower than the global vector's: updates are measured from the rounded start.
        self.start = trainer.weights.to(trainer.vector.dtype)
        self.diverged = []
        for client in cohort.clients:
            if trainer.max_diverged:
                self.recorder.mark()
            update = self._train_client(client)
            if update is None or update.num_steps == 0 or update.distance == 0:
                continue
            update.weight = aggregator.client_weight(client)
            trainer.call("on_client_end", update, module=False)
            if self.client_end_hooks and self._is_diverged(client):  # an edit may have gone wrong
                continue
            self.reducer.add(update, average_buffers=aggregator.buffers == "average")
            self.max_steps = max(self.max_steps, update.num_steps)
        self.optimizer.start_client()  # hooks between rounds find, and may change, the round's hyper-parameters
        return self.reducer.reduce(cohort.round)

    def _train_client(self, client: Client) -> Update | None:
        """Trains one client; None if it diverged and is left out."""
        trainer, vector = self.trainer, self.trainer.vector
        vector.data.copy_(self.start)
        trainer.buffers.load(client)
        self.optimizer.start_client()
        loss = self._take_gradient(client, "start")
        self.seed = seed_for(trainer.seed, Purpose.LOCAL, client.round, client.id)
        seed_everywhere(self.seed)
        trainer.client = client
        trainer.call("on_client_start", client, module=False)
        steps = self._run_local_steps(client)
        trainer.client, trainer.local_step, self.recorder.batch_size = None, 0, 1
        vector.refresh()
        self.delta.copy_(vector.data).sub_(self.start)
        if self._is_diverged(client):
            return None
        at_end = self._take_gradient(client, "end")
        trainer.buffers.store(client)
        update = Update(client, self.delta, steps, trainer.buffers.live.tensors())
        update.gradient, update.loss = self.gradient, loss if at_end is None else at_end
        if self.needs_distance and steps:
            rates, momenta = zip(*self.step_options, strict=True)
            update.distance = optimizer_distance(self.optimizer.optimizer, rates, momenta)
        return update

    def _take_gradient(self, client: Client, point: str) -> Tensor | None:
        """Computes the gradient over the client's full data, if it is asked for at this point; returns the loss."""
        if self.gradient_at != point or self.gradient is None:
            return None
        return self.full_gradient.compute(client, self.gradient)

    def _run_local_steps(self, client: Client) -> int:
        """Runs local epochs or steps; returns the optimizer steps taken."""
        most, window, steps, filled = self.trainer.local_steps, self.step.accumulate, 0, 0
        skipping, steps_before = False, -1
        for batch, batch_idx, last in self._batches(client):
            if batch_idx == 0 and most is not None:
                if steps == steps_before:  # the module skips every epoch before its first step: there is no end to it
                    break
                steps_before = steps
            skipping = skipping and batch_idx > 0
            if skipping:
                continue
            if filled == 0:
                self._start_local_step(client, steps)
                if self.needs_distance:  # of the steps taken so far, and of this one
                    self.step_options = [*self.step_options[:steps], self.optimizer.step_options]
            if self._start_batch(batch, batch_idx):  # the module skips the rest of the epoch
                skipping, filled = True, 0
                continue
            filled += 1
            if filled < window and not last:
                output = self.step.accumulate_only(batch, batch_idx, first=filled == 1)
            else:
                output = self.step.step(batch, batch_idx, first=filled == 1)
                steps, filled = steps + 1, 0
                self.optimizer.after_step(steps)
                self.trainer.local_step = steps
            self._end_batch(output, batch, batch_idx)
            if steps == most:
                break
        return steps

    def _batches(self, client: Client) -> Iterator[tuple[Any, int, bool]]:
        """Yields (batch, index within the epoch, whether it is the epoch's last) over all local epochs."""
        trainer = self.trainer
        order_stream = generator_for(trainer.seed, Purpose.SHUFFLE, client.round, client.id)
        size, epoch = self.source.batch_size, 0
        last = -(-client.num_samples // size) - 1
        while trainer.local_epochs is None or epoch < trainer.local_epochs:
            order = torch.randperm(client.num_samples, generator=order_stream)
            # What is random in reading samples has streams of its own, apart for each epoch; tensors need none.
            at = (client.round, client.id, epoch)
            seed = seed_for(trainer.seed, Purpose.READ, *at) if self.source.reads_are_seeded else 0
            for index, batch in enumerate(self.source.batches(client.id, order, seed)):
                self.recorder.batch_size = count = min(size, client.num_samples - index * size)
                self.samples += count
                yield (batch if self.transfer is None else self.transfer(batch, 0)), index, index == last
            epoch += 1

    def _start_local_step(self, client: Client, step: int) -> None:
        for hook in self.step_start_hooks:
            hook(self.trainer, self.module, client, step)

    def _start_batch(self, batch: Any, batch_idx: int) -> bool:
        for hook in self.batch_start_hooks:
            hook(self.trainer, self.module, batch, batch_idx)
        return self.module_batch_start is not None and self.module_batch_start(batch, batch_idx) == -1

    def _end_batch(self, output: Any, batch: Any, batch_idx: int) -> None:
        for hook in self.batch_end_hooks:
            hook(self.trainer, self.module, output, batch, batch_idx)
        if self.module_batch_end is not None:
            self.module_batch_end(output, batch, batch_idx)

    def _is_diverged(self, client: Client) -> bool:
        """Finds an update or a loss with NaN or infinity, by one read from the device for each client.

        Raises:
            FederatedError: If more of the cohort has diverged than the trainer's ``max_diverged`` allows.
        """
        loss = self.recorder.peek("train/loss")
        size: Tensor = self.delta.norm() if loss is None else self.delta.norm() + loss
        live = self.trainer.buffers.live.tensors() if self.finite_buffers else {}
        for name in self.finite_buffers:
            size = size + live[name].norm()
        if math.isfinite(size.item()):
            return False
        self.diverged.append(client.id)
        if len(self.diverged) > self.trainer.max_diverged * self.cohort_size:
            raise FederatedError(
                f"Expected finite losses and updates, but client {client.id} diverged in round {client.round}: lower "
                "the learning rate in the model's optimizer, set `--trainer.gradient_clip_val`, check its data, or let "
                "`--trainer.max_diverged` leave out such clients."
            )
        self.recorder.roll_back()
        rank_zero_warn(f"Client {client.id} diverged in round {client.round} and is left out of it.")
        return True
