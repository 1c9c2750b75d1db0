"""Trains many clients of a cohort at once: their weights are the rows of a matrix."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_fed.client_algorithms.losses import ClientLosses
from lightning_fed.core.devices import to_device
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.logged_values import LoggedValue
from lightning_fed.core.seeding import Purpose, seed_everywhere, seed_for
from lightning_fed.core.updates import Client, Update
from lightning_fed.engines.base import Engine
from lightning_fed.engines.client_batches import explained_batches
from lightning_fed.engines.second_pass import StackedBatchGradient
from lightning_fed.engines.vectorized.batches import LaneBatches
from lightning_fed.engines.vectorized.full_gradient import StackedFullGradient
from lightning_fed.engines.vectorized.lanes import Lanes, keep_freed_memory
from lightning_fed.engines.vectorized.refusals import CannotStack, explained_refusals
from lightning_fed.engines.vectorized.step import LaneLog, StackedStep

__all__ = ["VectorizedEngine"]


class VectorizedEngine(Engine):
    """Trains a chunk of clients under ``torch.func.vmap``, then lets them enter the round one by one.

    Args:
        chunk_size: Clients trained at once.
        stack_full_gradients: Whether gradients over the clients' full data are taken at once too.

    Raises:
        CannotStack: If the model or the run cannot train this way.
    """

    def __init__(self, *args: Any, chunk_size: int, stack_full_gradients: bool = True) -> None:
        super().__init__(*args)
        self.chunk_size = chunk_size
        if self.state.vector.device.type == "cpu":
            keep_freed_memory()
        self.step = StackedStep(self.state, self.options.engine == "auto")
        self.step.client_losses = self.client_losses = ClientLosses.of(self.state, self.options, self.algorithms)
        self.stacked_gradient: StackedFullGradient | None = None
        if stack_full_gradients and self.full_gradient.over == "data":
            self.stacked_gradient = StackedFullGradient(self.state, self.options, self.step, chunk_size)
            self.start_gradients.full_gradient = self.stacked_gradient
        self.lanes: Lanes  # made with the first chunk
        self.capacity = 0
        self.kept_gradients: Tensor | None = None
        self.started: dict[int, dict[str, LoggedValue]] = {}  # what each lane's start has logged
        self.gradient_hooks = self.hooks.bound("on_before_optimizer_step")
        self.second: StackedBatchGradient | None = None
        if any(algorithm.takes_second_gradient for algorithm in self.algorithms):
            self.second = StackedBatchGradient(self)
            self.gradient_hooks = self.second.within(self.gradient_hooks)
        self.client_start_hooks = self.hooks.bound("on_client_start")
        mine = (cb for cb in self.hooks.callbacks if isinstance(cb, FederatedCallback))
        self.keeping = [cb for cb in mine if cb.stacks or cb in self.algorithms]  # vectors of its own for each lane
        self.ended: dict[int, tuple[Tensor, Tensor]] = {}  # gradient and loss where a client ended, by its id
        # Only its options are used. Without this, a schedule would warn that it steps before its optimizer does.
        self.optimizer.optimizer._opt_called = True  # type: ignore[attr-defined]  # what torch's schedules look for

    def updates(self, clients: tuple[Client, ...]) -> Iterator[Update]:
        """Trains chunk after chunk; see ``Engine.updates``."""
        for first in range(0, len(clients), self.chunk_size):
            chunk = clients[first : first + self.chunk_size]
            with explained_refusals(len(chunk)):
                trained = self._train_chunk(chunk)
            yield from trained

    def _train_chunk(self, clients: tuple[Client, ...]) -> Iterator[Update]:
        """Takes all steps of the clients; iterating over the result lets them enter the round, one by one."""
        self.optimizer.start_client()
        self.at_work = clients
        self._make_room(len(clients))
        batches = LaneBatches(self.state, self.options, clients, self.step.reads_batch_idx, phases=self.phases)
        log = LaneLog(len(clients))
        self._start_clients(batches, clients)
        self.watch.start_client()
        with explained_batches(clients, self.state.source.batch_size):
            options = self._run_steps(batches, log)
        self.watch.end_client()
        if moved := self.state.buffers.frozen.moved():
            raise CannotStack(f"training moves `{next(iter(moved))}`, which is frozen")
        self.samples += batches.samples
        return self._finish(batches, clients, log, options)

    def _make_room(self, count: int) -> None:
        """Allocates larger matrices if there are more clients than in any chunk before; 0 frees the matrices."""
        if not count or count > self.capacity:
            self.capacity, self.kept_gradients = 0, None
            vars(self).pop("lanes", None)  # first: there may not be room for both
        if count > self.capacity:
            self.lanes = Lanes(self.state, count)
            if self.phases.alternate:
                self.lanes.alternate()
            self.kept_gradients = self.lanes.matrix() if self.gradient_at in ("last_step", "end") else None
            self.capacity = self.lanes.capacity

    def _start_clients(self, batches: LaneBatches, clients: tuple[Client, ...]) -> None:
        """Lets every client start at the global model, or where hooks displace it, in ascending order of id."""
        state, lanes = self.state, self.lanes
        lanes.start(batches.clients, self.start)
        self.started.clear()
        lane_of = {client.id: lane for lane, client in enumerate(batches.clients)}
        if self.start_gradients.level == "client":
            lanes.compute_own(self.start_gradients, batches.clients)
        elif self.start_gradients.losses_alone:
            lanes.own_losses = self.start_gradients.full_gradient.compute_at_start(batches.clients, None)
        per_client = self.client_start_hooks or (state.buffers.values and state.buffers.policy == "local")
        for client in clients if per_client else ():
            lane = lane_of[client.id]
            state.vector.data.copy_(self.start)
            state.vector.personal.copy_(lanes.personal[lane])
            state.buffers.load(client)
            lanes.give_gradient(lane, self.start_gradients, client)
            state.enter(client, self.start)
            seed_everywhere(seed_for(state.seed, Purpose.LOCAL, client.round, client.id))
            logged, self.recorder.series = self.recorder.series, {}
            with lanes.of(lane, self.keeping):
                self.hooks("on_client_start", client, module=False)
            self.started[lane], self.recorder.series = self.recorder.series, logged
            lanes.take_start(lane, self.start)
        state.leave_client()
        lanes.close_start(self.start)

    def _run_steps(self, batches: LaneBatches, log: LaneLog) -> list[tuple[float, float]]:
        """Takes all local steps; returns learning rate and momentum of each."""
        state, lanes, options = self.state, self.lanes, []
        first = min(client.id for client in batches.clients)
        seed_everywhere(seed_for(state.seed, Purpose.LOCAL, batches.clients[0].round, first))
        lanes.start_phase(body=False)
        lanes.take_rates([client.lr_factor for client in batches.clients])
        for step in range(batches.rounds):
            state.local_step = step
            if self.phases.alternate and step == batches.head[0]:
                lanes.start_phase(body=True)
            lanes.narrow(batches.active(step))
            self._take_gradients(batches, log, step)
            self._edit_gradients()
            if self.needs_distance and step >= batches.head[0]:
                options.append(self.optimizer.step_options)
            lanes.step()
            self.optimizer.after_step(step + 1)
        state.local_step = 0
        return options

    def _take_gradients(self, batches: LaneBatches, log: LaneLog, step: int) -> None:
        lanes = self.lanes
        for run in batches.groups(step):
            weights = lanes.gradient_points(run.lanes)
            buffers = {name: rows[run.lanes] for name, rows in lanes.buffers.items()}
            out = (lanes.gradients if run.first else lanes.further_gradients)[run.lanes]
            own = self._own_of(run.lanes)
            if self.second is not None:
                self.second.note(run, buffers, own)
            logged, totals = self.step(weights, buffers, run.batch, run.batch_idx, run.size, out, own)
            if not run.first:
                lanes.gradients[run.lanes].add_(out)
            log.add(run.lanes, logged, totals)
        if self.options.accumulate_grad_batches > 1:
            lanes.gradients[: lanes.active].div_(self.options.accumulate_grad_batches)

    def _own_of(self, lanes: slice) -> list[dict[str, Tensor]]:
        """Returns what loss algorithms keep for the clients of some lanes; nothing if there are none."""
        if self.client_losses is None:
            return []
        with self.lanes.of(lanes, self.keeping):
            return self.client_losses.own(lanes.stop - lanes.start)

    def _edit_gradients(self) -> None:
        """Lets client algorithms edit the gradients of all active lanes, then clips: scale, add, clip, step."""
        lanes = self.lanes
        if self.gradient_at == "last_step" and self.kept_gradients is not None:
            self.kept_gradients[: lanes.active].copy_(lanes.gradients[: lanes.active, : self.state.vector.numel])
            for part in self.state.untrained:
                self.kept_gradients[: lanes.active, part] = 0
        if self.gradient_hooks:
            with lanes.stacked(self.keeping):
                for hook in self.gradient_hooks:
                    hook(self.optimizer.optimizer)
        if clip_val := self.options.gradient_clip_val:
            lanes.clip(clip_val, self.options.gradient_clip_algorithm or "norm", self.state.untrained)

    def _finish(
        self, batches: LaneBatches, clients: tuple[Client, ...], log: LaneLog, options: list[tuple[float, float]]
    ) -> Iterator[Update]:
        """Yields the updates of those that did not diverge, in ascending order of id."""
        lane_of = {client.id: lane for lane, client in enumerate(batches.clients)}
        finite = self._finite(batches.clients, log)
        for client in clients:
            if not finite[lane_of[client.id]]:
                self.divergence.leave_out(client)
        left = tuple(client for client in clients if finite[lane_of[client.id]])
        if self.gradient_at == "end":
            self._take_end_gradients(left, [lane_of[client.id] for client in left])
        per_client = bool(self.options.tolerance.max_diverged)  # so that only a client that a hook spoils is dropped
        if not per_client:
            self._record(log, [lane_of[client.id] for client in left])
        for client in left:
            lane = lane_of[client.id]
            if per_client:
                self.recorder.mark()
                self._record(log, [lane])
            with self.lanes.of(lane, self.keeping):
                self.at_work = (client,)
                update = self._update(
                    client, lane, options[: batches.steps[lane] - batches.head[lane]], batches.steps[lane]
                )
                if update is not None and update.took_step:
                    yield update

    def _take_end_gradients(self, clients: tuple[Client, ...], lanes: list[int]) -> None:
        """Computes the gradients of clients where they ended, if they can be taken at once."""
        self.ended = {}
        if self.stacked_gradient is None or self.kept_gradients is None or not clients:
            return
        at, rows = to_device(torch.tensor(lanes), self.state.weights.device), self.kept_gradients[: len(lanes)]
        buffers = {name: value[at] for name, value in self.lanes.buffers.items()}
        losses = self.stacked_gradient.compute_at(self.lanes.ends(at), buffers, clients, rows)
        if losses is not None:
            self.ended = {client.id: (row, loss) for client, row, loss in zip(clients, rows, losses, strict=True)}

    def _end_gradient(self, client: Client, out: Tensor) -> Tensor:
        """Returns the loss where a client ended, and its gradient there in ``out``; see ``Engine``."""
        if client.id not in self.ended:
            return super()._end_gradient(client, out)
        self.more_samples += client.num_samples
        gradient, loss = self.ended[client.id]
        out.copy_(gradient)
        return loss

    def _record(self, log: LaneLog, lanes: list[int]) -> None:
        """Records what the clients that enter the round have logged."""
        for lane in lanes:
            self.recorder.merge(self.started.get(lane, {}))
        self.recorder.merge(log.of(lanes))

    def _finite(self, clients: tuple[Client, ...], log: LaneLog) -> list[bool]:
        """Says of each lane whether its weights, loss, buffers and gradient at the start are finite."""
        lanes, count = self.lanes, len(clients)
        sizes: Tensor = torch.linalg.vector_norm(lanes.deltas(), dim=1)
        loss = log.total("train/loss")
        sizes = sizes if loss is None else sizes + loss
        if self.divergence.buffers:
            rows = [lanes.buffers[name][:count].reshape(count, -1) for name in self.divergence.buffers]
            sizes = sizes + self.divergence.buffer_sizes([torch.linalg.vector_norm(row, dim=1) for row in rows])
        if self.start_gradients.method_level == "client":
            sizes = sizes + lanes.own_sizes()
        if self.state.num_personal:
            sizes = sizes + torch.linalg.vector_norm(lanes.personal[:count], dim=1)
        return self.divergence.finite(clients, sizes)

    def _update(self, client: Client, lane: int, options: list[tuple[float, float]], steps: int) -> Update | None:
        """Puts the trained client into the resident module and reads its update."""
        state, lanes = self.state, self.lanes
        state.vector.all_data.copy_(lanes.weights[lane])
        state.origin = lanes.origin_of(lane)
        if lanes.buffers:
            state.buffers.live.load({name: rows[lane] for name, rows in lanes.buffers.items()})
        lanes.give_gradient(lane, self.start_gradients, client)
        update = Update(client, lanes.deltas()[lane], steps)
        if self.gradient_at == "last_step" and self.gradient is not None and self.kept_gradients is not None:
            self.gradient.copy_(self.kept_gradients[lane])
        if not self._take_gradient(update):
            return None
        update.buffers = state.buffers.of_client() if lanes.buffers else {}
        if self.needs_distance:
            update.distance = self._distance([(lr * client.lr_factor, momentum) for lr, momentum in options])
        return update
