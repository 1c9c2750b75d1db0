"""Trains the clients of a cohort one after another on one resident module and optimizer."""

from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import torch

from lightning_fed.core.devices import is_device_fault
from lightning_fed.core.seeding import Purpose, seed_everywhere, seed_for
from lightning_fed.core.updates import Client, Update
from lightning_fed.core.user_code import overrides
from lightning_fed.engines.base import ClientTrainer, FinishedClient, TrainingParts
from lightning_fed.engines.client_batches import (
    explained_batches,
    read_batches,
    samples_in_epoch,
    send_order,
    steps_in_epochs,
)
from lightning_fed.engines.local_step import LocalStep
from lightning_fed.engines.manual_step import ManualStep
from lightning_fed.engines.trial import Attributes
from lightning_fed.errors import FederatedError
from lightning_fed.functional.local import difference

__all__ = ["SequentialTrainer"]


class SequentialTrainer(ClientTrainer):
    """Loads the global model by one copy, runs local steps, and reads the update by one subtraction."""

    def __init__(self, parts: TrainingParts) -> None:
        super().__init__(parts)
        module = self.module
        self.step = (LocalStep if module.automatic_optimization else ManualStep)(parts)
        self.delta = torch.empty_like(self.state.weights)
        self.client_start_hooks = self.hooks.bound("on_client_start")
        self.step_start_hooks = self.hooks.bound("on_local_step_start")
        self.batch_start_hooks = self.hooks.bound("on_train_batch_start")
        self.batch_end_hooks = self.hooks.bound("on_train_batch_end", module=True)
        self.module_batch_start = module.on_train_batch_start if overrides(module, "on_train_batch_start") else None
        self.stream = torch.Generator()  # seeded for each client, which takes half as long as making a new one
        self.rates: list[tuple[float, float]] = []
        if parts.needs_distance:  # read as a step ends: hooks change rates up to the last moment, and steps are skipped
            local = self.optimizer
            local.optimizer.register_step_post_hook(
                lambda *_: None if self.phases.in_head else self.rates.append(local.step_options)
            )
        if self.options.changes_rates:  # after the hook above, which reads the scaled rates
            self.optimizer.scale_rates()

    def train(self, clients: tuple[Client, ...]) -> Iterator[FinishedClient]:
        for client in clients:
            if self.options.tolerance.max_diverged:
                self.recorder.mark()
            if (steps := self._train_or_skip(client)) is not None:
                yield self._finish(client, steps)

    def _train_or_skip(self, client: Client) -> int | None:
        """Trains one client; returns the steps taken, None if an exception leaves it out."""
        if self.options.tolerance.on_client_error == "raise":
            return self.train_client(client)
        before = Attributes(self.module)
        try:
            return self.train_client(client)
        except Exception as error:
            if is_device_fault(error):
                raise
            self.divergence.leave_out(client, error)
            before.put_back()
            self._leave_client()
            self.recorder.roll_back()
            return None

    def train_client(self, client: Client) -> int:
        """Trains one client in the resident module, where it stays; returns the steps taken."""
        self._start_client(client)
        with explained_batches((client,), self.state.source.batch_size):
            steps = self._run_local_steps(client)
        self.watch.end_client()
        self._leave_client()
        return steps

    def _start_client(self, client: Client) -> None:
        """Puts a client at the global model, or where hooks displace it."""
        state, at = self.state, (client.round, client.id)
        state.enter(client, self.parts.start)
        state.vector.data.copy_(self.parts.start)
        state.load_own(client.id)
        state.buffers.load(client)
        self.optimizer.start_client()
        self.optimizer.lr_factor = client.lr_factor
        self.rates.clear()
        self.stream.manual_seed(seed_for(state.seed, Purpose.SHUFFLE, *at))
        self.start_gradients.load(client)
        seed_everywhere(seed_for(state.seed, Purpose.LOCAL, *at))
        for hook in self.client_start_hooks:
            hook(client)
        self.optimizer.fresh.begin()
        self.watch.start_client()

    def _leave_client(self) -> None:
        """Cleans up after a client, before the next one; frozen parameters that it moved are buffers from now on."""
        moved, count = self.state.buffers.take_in_moved(), self.parts.processes.size
        if moved and count > 1:
            raise FederatedError(
                "Expected `--trainer.devices 1` where training moves frozen parameters, as it does "
                f"`{next(iter(moved))}` of {type(self.module).__name__}, got {count} processes: register it as a "
                "buffer."
            )
        self.state.leave_client()
        self.recorder.batch_size = 1
        self.state.vector.refresh()

    def _finish(self, client: Client, steps: int) -> FinishedClient:
        """Reads the update of the trained client, which stays in the resident module."""
        state, module = self.state, type(self.module).__name__
        difference(state.vector.data, state.origin, self.delta)
        if not steps and torch.count_nonzero(self.delta):
            raise FederatedError(
                f"Expected {module} to train by the loss that `training_step` returns, but it changed its weights "
                "itself: set `automatic_optimization = False` if it steps its optimizers."
                if self.module.automatic_optimization
                else f"Expected `training_step` of {module} to step an optimizer of `self.optimizers()`, because "
                "`automatic_optimization` is False, but it changed the weights itself."
            )
        update = Update(client, self.delta, steps, gradient=self.step.last_gradient)
        return FinishedClient(update, state.origin, rates=self.rates)

    def _run_local_steps(self, client: Client) -> int:
        """Runs local epochs or steps; returns the optimizer steps taken."""
        most, window, steps, filled = client.steps or self.options.local_steps, self.step.accumulate, 0, 0
        skipping, steps_before = False, -1
        for batch, batch_idx, last in self._batches(client):
            if batch_idx == 0 and most is not None:
                if steps == steps_before:  # the module skips every epoch before its first step: there is no end to it
                    break
                steps_before = steps
            self.state.is_last_batch = last
            skipping = skipping and batch_idx > 0
            if skipping:
                continue
            if filled == 0:
                for hook in self.step_start_hooks:
                    hook(client, steps)
            for hook in self.batch_start_hooks:
                hook(batch, batch_idx)
            if self.module_batch_start is not None and self.module_batch_start(batch, batch_idx) == -1:
                skipping, filled = True, 0  # the rest of the epoch, as the module asks
                continue
            filled += 1
            closes = filled == window or last
            output = self.step.step(batch, batch_idx, filled == 1, closes)
            if closes:
                filled = 0
                if self.step.taken:
                    steps += 1
                    self.optimizer.after_step(steps)
                    self.state.local_step = steps
            if self.batch_end_hooks:
                outputs = self.step.outputs(output)
                for hook in self.batch_end_hooks:
                    hook(outputs, batch, batch_idx)
            if steps == most:
                break
        self.optimizer.fresh.switch("eval")
        return steps

    def _batches(self, client: Client) -> Iterator[tuple[Any, int, bool]]:
        """Yields (batch, index within the epoch, whether it is the epoch's last) over all local epochs."""
        state, size = self.state, self.state.source.batch_size
        samples = samples_in_epoch(state.source, client.num_samples)
        batches, window = -(-samples // size), self.step.accumulate
        per_epoch, epochs, steps = -(-batches // window), self.options.epochs, None
        if client.steps is None and epochs is not None:
            steps = steps_in_epochs(epochs, per_epoch)
        for epoch in count() if steps is None else range(-(-steps // max(per_epoch, 1))):
            # A part of an epoch is its first batches; of a whole one all are read, which finds any too many.
            some = batches if steps is None else min(batches, (steps - epoch * per_epoch) * window)
            read = None if some == batches else some
            order = send_order(state.source, torch.randperm(client.num_samples, generator=self.stream)[:samples])
            # Random numbers drawn while reading come from a separate stream for each epoch; tensors need none.
            at = (client.round, client.id, epoch)
            seed = seed_for(state.seed, Purpose.READ, *at) if state.source.reads_are_seeded else 0
            for index, batch in enumerate(islice(read_batches(state.source, client.id, order, seed), read)):
                self.recorder.batch_size = taken = min(size, samples - index * size)
                self.parts.counts.samples += taken
                yield (batch if state.transfer is None else state.transfer(batch, 0)), index, index == some - 1
