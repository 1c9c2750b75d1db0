"""Trains the clients of a cohort one after another on one resident module and optimizer."""

from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import torch

from lightning_fed.core.devices import is_device_fault
from lightning_fed.core.seeding import Purpose, seed_everywhere, seed_for
from lightning_fed.core.updates import Client, Update
from lightning_fed.core.user_code import overrides
from lightning_fed.engines.base import Engine
from lightning_fed.engines.client_batches import explained_batches, read_batches, samples_in_epoch, send_order
from lightning_fed.engines.local_step import LocalStep
from lightning_fed.engines.manual_step import ManualStep
from lightning_fed.engines.second_pass import BatchGradient
from lightning_fed.engines.trial import Attributes
from lightning_fed.errors import FederatedError
from lightning_fed.functional.local import difference

__all__ = ["SequentialEngine"]


class SequentialEngine(Engine):
    """Loads the global model by one copy, runs local steps, and reads the update by one subtraction."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        module = self.module
        self.step = (LocalStep if module.automatic_optimization else ManualStep)(self.state, self.options, self.hooks)
        self.delta = torch.empty_like(self.state.weights)
        self.client_start_hooks = self.hooks.bound("on_client_start")
        self.batch_start_hooks = self.hooks.bound("on_train_batch_start")
        self.batch_end_hooks = self.hooks.bound("on_train_batch_end", module=True)
        self.module_batch_start = module.on_train_batch_start if overrides(module, "on_train_batch_start") else None
        if self.gradient_at == "last_step":
            self.step.last_gradient = self.gradient
        if isinstance(self.step, LocalStep) and any(algorithm.takes_second_gradient for algorithm in self.algorithms):
            BatchGradient(self, self.step)
        self.stream = torch.Generator()  # seeded for each client, which takes half as long as making a new one
        self.step_options: list[tuple[float, float]] = []
        if self.needs_distance:  # read as a step ends: hooks change rates up to the last moment, and steps are skipped
            local = self.optimizer
            local.optimizer.register_step_post_hook(
                lambda *_: None if self.phases.in_head else self.step_options.append(local.step_options)
            )
        if self.options.changes_rates:  # after the hook above, which reads the scaled rates
            self.optimizer.scale_rates()

    def updates(self, clients: tuple[Client, ...]) -> Iterator[Update]:
        """Trains one client after the other; see ``Engine.updates``."""
        for client in clients:
            if self.options.tolerance.max_diverged:
                self.recorder.mark()
            update = self._train_client(client)
            if update is not None and update.took_step:
                yield update

    def _train_client(self, client: Client) -> Update | None:
        """Trains one client; returns its update, None if it is left out."""
        before = Attributes(self.module) if self.options.tolerance.on_client_error == "skip" else None
        try:
            self._start_client(client)
            with explained_batches((client,), self.state.source.batch_size):
                steps = self._run_local_steps(client)
            self.watch.end_client()
            self._leave_client()
        except Exception as error:
            if before is None or is_device_fault(error):
                raise
            self.divergence.leave_out(client, error)
            before.put_back()
            self._leave_client()
            self.recorder.roll_back()
            return None
        return self._measure(client, steps)

    def _start_client(self, client: Client) -> None:
        """Puts a client at the global model, or where hooks displace it."""
        state, at = self.state, (client.round, client.id)
        state.enter(client, self.start)
        state.vector.data.copy_(self.start)
        state.load_own(client.id)
        state.buffers.load(client)
        self.optimizer.start_client()
        self.optimizer.lr_factor = client.lr_factor
        self.step_options.clear()
        self.stream.manual_seed(seed_for(state.seed, Purpose.SHUFFLE, *at))
        self.start_gradients.load(client)
        seed_everywhere(seed_for(state.seed, Purpose.LOCAL, *at))
        for hook in self.client_start_hooks:
            hook(client)
        self.optimizer.fresh.begin()
        self.watch.start_client()

    def _leave_client(self) -> None:
        """Cleans up after a client, before the next one."""
        self._take_in_moved()
        self.state.leave_client()
        self.recorder.batch_size = 1
        self.state.vector.refresh()

    def _measure(self, client: Client, steps: int) -> Update | None:
        """Reads the update of the trained client; None if it is left out."""
        state, vector = self.state, self.state.vector
        difference(vector.data, state.origin, self.delta)
        if not steps and torch.count_nonzero(self.delta):
            raise FederatedError(
                f"Expected {type(state.module).__name__} to train by the loss that `training_step` returns, but it "
                "changed its weights itself: set `automatic_optimization = False` if it steps its optimizers."
                if state.module.automatic_optimization
                else f"Expected `training_step` of {type(state.module).__name__} to step an optimizer of "
                "`self.optimizers()`, because `automatic_optimization` is False, but it changed the weights itself."
            )
        start = self.start_gradients
        gradient = [start.gradient, start.loss] if start.method_level == "client" else []
        if self.divergence.found(client, self.delta, *gradient, *([vector.personal] if state.num_personal else [])):
            return None
        update = Update(client, self.delta, steps)
        if not self._take_gradient(update):
            return None
        update.buffers = state.buffers.of_client()
        if self.needs_distance and steps:
            update.distance = self._distance(self.step_options)
        return update

    def _take_in_moved(self) -> None:
        """Turns frozen parameters that the client moved into buffers; earlier clients did not move them."""
        for name, value in self.state.buffers.take_in_moved().items():
            if self.processes.size > 1:
                raise FederatedError(
                    f"Expected `--trainer.devices 1` where training moves frozen parameters, as it does `{name}` of "
                    f"{type(self.module).__name__}, got {self.processes.size} processes: register it as a buffer."
                )
            if self.aggregator.buffers == "average":
                self.reducer.begin_buffer(name, value)

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
        last = -(-samples // size) - 1
        epochs = self.options.epochs if client.steps is None else None
        for epoch in islice(count(), epochs):
            order = send_order(state.source, torch.randperm(client.num_samples, generator=self.stream)[:samples])
            # Random numbers drawn while reading come from a separate stream for each epoch; tensors need none.
            at = (client.round, client.id, epoch)
            seed = seed_for(state.seed, Purpose.READ, *at) if state.source.reads_are_seeded else 0
            for index, batch in enumerate(read_batches(state.source, client.id, order, seed)):
                self.recorder.batch_size = taken = min(size, samples - index * size)
                self.samples += taken
                yield (batch if state.transfer is None else state.transfer(batch, 0)), index, index == last
