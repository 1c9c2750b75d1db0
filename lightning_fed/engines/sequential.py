"""Trains the clients of a cohort one after another on one resident module and optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.engines.divergence import DivergenceWatch
from lightning_fed.engines.full_gradient import FullGradient
from lightning_fed.engines.local_step import LocalStep, overriding_hooks
from lightning_fed.engines.start_gradients import StartGradients
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
        self.client_entered_hooks = overriding_hooks(trainer, "on_client_entered")
        self.step_start_hooks = overriding_hooks(trainer, "on_local_step_start")
        self.batch_start_hooks = overriding_hooks(trainer, "on_train_batch_start")
        self.batch_end_hooks = overriding_hooks(trainer, "on_train_batch_end")
        self.module_batch_start = module.on_train_batch_start if overrides(module, "on_train_batch_start") else None
        self.module_batch_end = module.on_train_batch_end if overrides(module, "on_train_batch_end") else None
        self.max_steps = 0
        self.samples = 0
        self.end_samples = 0
        self.divergence = DivergenceWatch(trainer, recorder)
        self._set_up_gradients()

    def _set_up_gradients(self) -> None:
        """Prepares what the aggregator and client algorithms ask for beyond the updates."""
        trainer, aggregator = self.trainer, self.trainer.aggregator
        self.full_gradient = FullGradient(trainer, self.module, self.source, self.transfer)
        trainer.start_gradients = self.start_gradients = StartGradients(trainer, self.full_gradient)
        asked = bool(aggregator.all_needs & Need.ANY_GRADIENT)
        self.gradient_at = aggregator.gradient_at if asked else None
        # A gradient that enters a sum spoils it if it is not finite; a method that gets them all looks for itself.
        self.sums_gradients = bool(aggregator.all_needs & (Need.GRADIENT_MEAN | Need.GRADIENT_SIGN_SUM))
        self.gradient = torch.empty_like(self.delta) if self.gradient_at in ("end", "last_step") else None
        if self.gradient_at == "last_step":
            self.step.last_gradient = self.gradient
        algorithms = [cb for cb in trainer.callbacks if isinstance(cb, ClientAlgorithm)]
        self.algorithms = algorithms
        by_aggregator = Need.NORMALIZED_MEAN in aggregator.all_needs
        self.needs_distance = by_aggregator or any(algorithm.needs_distance for algorithm in algorithms)
        self.distance_option = "--aggregator" if by_aggregator else "--client"
        self.step_options: list[tuple[float, float]] = []
        if self.needs_distance:  # read as a step ends: hooks change rates up to the last moment, and steps are skipped
            local = self.optimizer
            local.optimizer.register_step_post_hook(lambda *_: self.step_options.append(local.step_options))

    @property
    def full_gradient_samples(self) -> int:
        """Samples whose gradient was computed in this round apart from local steps, for an algorithm."""
        return self.start_gradients.samples + self.end_samples

    def train(self, cohort: Cohort) -> ReducedUpdate:
        """Trains every client of the cohort and reduces their updates.

        Args:
            cohort: The round's clients, in ascending order of id.

        Returns:
            The reduced update; no client in it if none took a step.
        """
        trainer, aggregator = self.trainer, self.trainer.aggregator
        self.reducer.reset(len(cohort.clients))
        self.divergence.start_round(len(cohort.clients))
        self.max_steps = self.samples = self.end_samples = 0
        self.optimizer.start_round()
        # The live model's dtype can be narrower than the global vector's: updates are measured from the rounded start.
        self.start = trainer.weights.to(trainer.vector.dtype)
        for client in self._exchange(cohort):
            if trainer.max_diverged:
                self.recorder.mark()
            update = self._train_client(client)
            if update is None or update.num_steps == 0 or update.distance == 0:
                continue
            update.weight = aggregator.client_weight(client)
            trainer.call("on_client_end", update, module=False)
            if self.client_end_hooks and self.divergence.found(client, self.delta):  # an edit may have gone wrong
                continue
            self.reducer.add(update, average_buffers=aggregator.buffers == "average")
            trainer.buffers.store(client)
            for hook in self.client_entered_hooks:
                hook(trainer, self.module, update)
            self.max_steps = max(self.max_steps, update.num_steps)
        self.optimizer.start_client()  # hooks between rounds find, and may change, the round's hyper-parameters
        return self.reducer.reduce(cohort.round)

    def _exchange(self, cohort: Cohort) -> tuple[Client, ...]:
        """Computes the cohort's gradients at w, if they are asked for; returns the clients that have one."""
        sizes = self.start_gradients.open(cohort)
        if sizes is None:
            return cohort.clients
        finite = torch.isfinite(sizes).tolist()
        if all(finite):
            return cohort.clients
        for client, good in zip(cohort.clients, finite, strict=True):
            if not good:
                self.divergence.leave_out(client)
        kept = tuple(client for client, good in zip(cohort.clients, finite, strict=True) if good)
        self.start_gradients.keep(kept)
        return kept

    def _train_client(self, client: Client) -> Update | None:
        """Trains one client; None if it diverged and is left out."""
        trainer, vector = self.trainer, self.trainer.vector
        vector.data.copy_(self.start)
        trainer.buffers.load(client)
        self.optimizer.start_client()
        self.step_options.clear()
        self.start_gradients.load(client)
        trainer.origin, trainer.displacement = self.start, None
        self.seed = seed_for(trainer.seed, Purpose.LOCAL, client.round, client.id)
        seed_everywhere(self.seed)
        trainer.client = client
        trainer.call("on_client_start", client, module=False)
        steps = self._run_local_steps(client)
        trainer.client, trainer.local_step, self.recorder.batch_size = None, 0, 1
        trainer.displacement = None
        vector.refresh()
        self.delta.copy_(vector.data).sub_(trainer.origin)
        start = self.start_gradients
        gradient = [start.gradient, start.loss] if start.method_level == "client" else []
        if self.divergence.found(client, self.delta, *gradient):
            return None
        update = Update(client, self.delta, steps)
        if self.gradient_at is not None and not self._take_gradient(update):
            return None
        update.buffers = trainer.buffers.live.tensors()
        if self.needs_distance and steps:
            update.distance = self._distance()
        return update

    def _take_gradient(self, update: Update) -> bool:
        """Adds the gradient that the aggregator asks for; False if the client is left out for it."""
        client = update.client
        if self.gradient_at == "start":
            update.gradient, update.loss = self.start_gradients.gradient, self.start_gradients.loss
            return True
        assert self.gradient is not None
        update.gradient = self.gradient
        if self.gradient_at == "end":
            update.loss = self._end_gradient(client, self.gradient)
        return not (self.sums_gradients and self.divergence.found(client, self.gradient))

    def _end_gradient(self, client: Client, out: Tensor) -> Tensor:
        """Computes the gradient where the client ended, without a displacement of its start; returns the loss."""
        trainer, weights = self.trainer, self.trainer.vector.data
        self.end_samples += client.num_samples
        # The pass comes before hooks that may draw; what they draw does not depend on it.
        with isolate_rng():
            if torch.equal(trainer.origin, self.start):  # by value: a displacement of 0 must leave no rounding
                return self.full_gradient.compute(client, out)
            end = weights.clone()
            weights.sub_(trainer.origin).add_(self.start)
            loss = self.full_gradient.compute(client, out)
            weights.copy_(end)
        return loss

    def _distance(self) -> float:
        rates, momenta = [lr for lr, _ in self.step_options], [momentum for _, momentum in self.step_options]
        pull = sum(algorithm.pull for algorithm in self.algorithms)
        return optimizer_distance(self.optimizer.optimizer, rates, momenta, pull, self.distance_option)

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
