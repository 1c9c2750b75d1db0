"""Trains many clients of a cohort at once: their weights are the rows of a matrix."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_fed.client_algorithms.losses import ClientLosses
from lightning_fed.core.devices import to_device
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.logged_values import LoggedValue
from lightning_fed.core.seeding import Purpose, seed_everywhere, seed_for
from lightning_fed.core.updates import Client, Update
from lightning_fed.engines.base import ClientTrainer, FinishedClient, TrainingParts
from lightning_fed.engines.client_batches import explained_batches
from lightning_fed.engines.second_pass import StackedBatchGradient
from lightning_fed.engines.vectorized.batches import LaneBatches
from lightning_fed.engines.vectorized.full_gradient import StackedFullGradient
from lightning_fed.engines.vectorized.lanes import Lanes, keep_freed_memory
from lightning_fed.engines.vectorized.refusals import CannotStack, is_of_many, refusal
from lightning_fed.engines.vectorized.step import LaneLog, SampleGradients, StackedStep

__all__ = ["TrainedChunk", "VectorizedTrainer"]


class TrainedChunk(NamedTuple):
    """Clients that have trained at once: their lanes, what they logged, and the rates of each step if asked for."""

    batches: LaneBatches
    log: LaneLog
    rates: list[tuple[float, float]]


class VectorizedTrainer(ClientTrainer):
    """Trains a chunk of clients under ``torch.func.vmap``, then hands them over one by one.

    Args:
        parts: See ``ClientTrainer``.
        chunk_size: Clients trained at once.
        stack_full_gradients: Whether gradients over the clients' full data are taken at once too.
        around_steps: Makes, of the clients of a chunk, a block around their steps.
    """

    def __init__(
        self,
        parts: TrainingParts,
        chunk_size: int,
        stack_full_gradients: bool = True,
        around_steps: Callable[[tuple[Client, ...]], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__(parts)
        self.chunk_size, self.around_steps = chunk_size, around_steps
        if self.state.vector.device.type == "cpu":
            keep_freed_memory()
        self.client_losses = ClientLosses.of(self.state, self.options, self.algorithms)
        self.step = StackedStep(self.state, self.options.engine == "auto", self.client_losses)
        self.stacked_gradient: StackedFullGradient | None = None
        if stack_full_gradients and self.start_gradients.full_gradient.over == "data":
            self.stacked_gradient = StackedFullGradient(self.state, self.options, self.step, chunk_size)
            self.start_gradients.full_gradient = self.stacked_gradient
        self.lanes: Lanes  # made with the first chunk
        self.capacity = 0
        self.kept_gradients: Tensor | None = None
        self.started: dict[int, dict[str, LoggedValue]] = {}  # what each lane's start has logged
        self.gradient_hooks = self.hooks.bound("on_before_optimizer_step")
        self.second = StackedBatchGradient(parts, self.step, lambda: self.lanes) if parts.asks_twice else None
        if self.second is not None:
            self.gradient_hooks = self.second.within(self.gradient_hooks)
        self.samples = SampleGradients(parts, parts.combines, self.step) if parts.combines else None
        self.client_start_hooks = self.hooks.bound("on_client_start")
        mine = (cb for cb in self.hooks.callbacks if isinstance(cb, FederatedCallback))
        self.keeping = [cb for cb in mine if cb.stacks or cb in self.algorithms]  # vectors of its own for each lane
        # Only its options are used. Without this, a schedule would warn that it steps before its optimizer does.
        self.optimizer.optimizer._opt_called = True  # type: ignore[attr-defined]  # what torch's schedules look for

    def train(self, clients: tuple[Client, ...]) -> Iterator[FinishedClient]:
        for first in range(0, len(clients), self.chunk_size):
            chunk = clients[first : first + self.chunk_size]
            try:
                trained = self.finish(self.train_chunk(chunk))
            except Exception as error:
                if not is_of_many(error):
                    raise
                raise refusal(error, len(chunk)) from error
            yield from trained

    def train_chunk(self, clients: tuple[Client, ...]) -> TrainedChunk:
        """Takes all steps of the clients, which stay in their lanes."""
        self.optimizer.start_client()
        self.parts.at_work = clients
        self.make_room(len(clients))
        batches = LaneBatches(self.state, self.options, clients, self.step.reads_batch_idx, phases=self.phases)
        log = LaneLog(len(clients))
        self._start_clients(batches, clients)
        self.watch.start_client()
        with explained_batches(clients, self.state.source.batch_size), self.around_steps(clients):
            rates = self._run_steps(batches, log)
        self.watch.end_client()
        if moved := self.state.buffers.frozen.moved():
            raise CannotStack(f"training moves `{next(iter(moved))}`, which is frozen")
        self.parts.counts.samples += batches.samples
        return TrainedChunk(batches, log, rates)

    def make_room(self, count: int) -> None:
        """Allocates larger matrices if there are more clients than in any chunk before; 0 frees the matrices."""
        if not count or count > self.capacity:
            self.capacity, self.kept_gradients = 0, None
            vars(self).pop("lanes", None)  # first: there may not be room for both
        if count > self.capacity:
            self.lanes = Lanes(self.state, count)
            if self.phases.alternate:
                self.lanes.alternate()
            self.kept_gradients = self.lanes.matrix() if self.parts.gradients.at in ("last_step", "end") else None
            self.capacity = self.lanes.capacity

    def _start_clients(self, batches: LaneBatches, clients: tuple[Client, ...]) -> None:
        """Lets every client start at the global model, or where hooks displace it, in ascending order of id."""
        state, lanes, start = self.state, self.lanes, self.parts.start
        lanes.start(batches.clients, start)
        self.started.clear()
        lane_of = {client.id: lane for lane, client in enumerate(batches.clients)}
        self.start_gradients.take_ahead(batches.clients)
        per_client = self.client_start_hooks or (state.buffers.values and state.buffers.policy == "local")
        for client in clients if per_client else ():
            lane = lane_of[client.id]
            state.vector.data.copy_(start)
            state.vector.personal.copy_(lanes.personal[lane])
            state.buffers.load(client)
            self.start_gradients.load(client)
            state.enter(client, start)
            seed_everywhere(seed_for(state.seed, Purpose.LOCAL, client.round, client.id))
            logged, self.recorder.series = self.recorder.series, {}
            with lanes.of(lane, self.keeping):
                self.hooks("on_client_start", client, module=False)
            self.started[lane], self.recorder.series = self.recorder.series, logged
            lanes.take_start(lane, start)
        state.leave_client()
        lanes.close_start(start)

    def _run_steps(self, batches: LaneBatches, log: LaneLog) -> list[tuple[float, float]]:
        """Takes all local steps; returns learning rate and momentum of each."""
        state, lanes, rates = self.state, self.lanes, []
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
            if self.parts.needs_distance and step >= batches.head[0]:
                rates.append(self.optimizer.step_options)
            lanes.step()
            self.optimizer.after_step(step + 1)
        state.local_step = 0
        return rates

    def _take_gradients(self, batches: LaneBatches, log: LaneLog, step: int) -> None:
        lanes = self.lanes
        if self.second is not None:
            self.second.begin()
        for run in batches.groups(step):
            weights = lanes.gradient_points(run.lanes)
            buffers = {name: rows[run.lanes] for name, rows in lanes.buffers.items()}
            out = (lanes.gradients if run.first else lanes.further_gradients)[run.lanes]
            if self.samples is not None:
                for at, client in enumerate(batches.clients[run.lanes]):
                    held = {name: rows[at] for name, rows in buffers.items()}
                    batch = tree_map(lambda leaf, at=at: leaf[at], run.batch)
                    self.samples(client, batch, run.batch_idx, weights[at], held, out[at])
                continue
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
        if self.parts.gradients.at == "last_step" and self.kept_gradients is not None:
            self.kept_gradients[: lanes.active].copy_(lanes.gradients[: lanes.active, : self.state.vector.numel])
            for part in self.state.untrained:
                self.kept_gradients[: lanes.active, part] = 0
        if self.gradient_hooks:
            with lanes.stacked(self.keeping):
                for hook in self.gradient_hooks:
                    hook(self.optimizer.optimizer)
        if clip_val := self.options.gradient_clip_val:
            lanes.clip(clip_val, self.options.gradient_clip_algorithm or "norm", self.state.untrained)

    def finish(self, chunk: TrainedChunk) -> Iterator[FinishedClient]:
        """Hands over the clients of a chunk that did not diverge, in ascending order of id."""
        batches = chunk.batches
        lane_of = {client.id: lane for lane, client in enumerate(batches.clients)}
        finite = self._finite(batches.clients, chunk.log)
        clients = sorted(batches.clients, key=lambda client: client.id)
        for client in clients:
            if not finite[lane_of[client.id]]:
                self.divergence.leave_out(client)
        left = [lane_of[client.id] for client in clients if finite[lane_of[client.id]]]
        gradients = self._kept_gradients([batches.clients[lane] for lane in left], left)
        per_client = bool(self.options.tolerance.max_diverged)  # so that only a client that a hook spoils is dropped
        if not per_client:
            for series in self._logged(chunk.log, left):
                self.recorder.merge(series)
        for lane in left:
            self.parts.at_work = (batches.clients[lane],)
            with self.lanes.of(lane, self.keeping):
                finished = self.hand_over(chunk, lane)
                finished.update.gradient, finished.update.loss = gradients.get(lane, (None, None))
                finished.logged = self._logged(chunk.log, [lane]) if per_client else ()
                yield finished

    def hand_over(self, chunk: TrainedChunk, lane: int) -> FinishedClient:
        """Returns what the client of a lane has trained."""
        lanes, batches = self.lanes, chunk.batches
        client, steps = batches.clients[lane], batches.steps[lane]
        self.start_gradients.load(client)
        return FinishedClient(
            Update(client, lanes.deltas()[lane], steps),
            lanes.origin_of(lane),
            weights=lanes.weights[lane],
            buffers={name: rows[lane] for name, rows in lanes.buffers.items()} or None,
            rates=[(lr * client.lr_factor, momentum) for lr, momentum in chunk.rates[: steps - batches.head[lane]]],
            checked=True,
        )

    def _kept_gradients(
        self, clients: Sequence[Client], lanes: list[int]
    ) -> dict[int, tuple[Tensor | None, Tensor | None]]:
        """Returns, by lane, gradients of the last steps, or gradients and losses at the end if taken at once."""
        kept = self.kept_gradients
        if kept is None or not clients:
            return {}
        if self.parts.gradients.at == "last_step":
            return {lane: (kept[lane], None) for lane in lanes}
        if self.stacked_gradient is None:
            return {}
        at, rows = to_device(torch.tensor(lanes), self.state.weights.device), kept[: len(lanes)]
        buffers = {name: value[at] for name, value in self.lanes.buffers.items()}
        losses = self.stacked_gradient.compute_at(self.lanes.ends(at), buffers, tuple(clients), rows)
        return {} if losses is None else dict(zip(lanes, zip(rows, losses, strict=True), strict=True))

    def _logged(self, log: LaneLog, lanes: list[int]) -> list[dict[str, LoggedValue]]:
        """Returns what the starts of some clients have logged, one after another, and then all their steps."""
        return [*(self.started.get(lane, {}) for lane in lanes), log.of(lanes)]

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
            sizes = sizes + self.start_gradients.sizes_at(clients)
        if self.state.num_personal:
            sizes = sizes + torch.linalg.vector_norm(lanes.personal[:count], dim=1)
        return self.divergence.finite(clients, sizes)
