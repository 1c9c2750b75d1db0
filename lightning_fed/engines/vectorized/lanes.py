"""The state of clients trained at once: each client has a lane, its row of every matrix."""

import ctypes
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from lightning_fed.core.devices import copy_each
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.optimizer.flat import FlatOptimizer
from lightning_fed.core.train_state import TrainState
from lightning_fed.core.updates import Client

__all__ = ["Lanes", "StackedVector", "keep_freed_memory"]

# M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>: keep up to 256 MiB, for blocks up to 32 MiB (the maximum).
_OPTIONS = ((-1, 1 << 28), (-3, 1 << 25))
_CHOSEN_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


class StackedVector:
    """Replaces ``trainer.vector`` where a hook edits the gradients of several clients at once.

    Attributes:
        data: Their live weights, shape (m, d).
        grad: Their gradients, shape (m, d).
        personal: The live weights that stay with them, shape (m, p).
    """

    def __init__(self, data: Tensor, grad: Tensor, personal: Tensor) -> None:
        self.data, self.grad, self.personal = data, grad, personal
        self.dtype, self.device, self.numel = data.dtype, data.device, data.shape[1]

    def scale_gradient(self, factor: float | Tensor) -> None:
        """Multiplies the gradients of the losses, with (m, 1) each by its own; terms of others are added afterwards."""
        self.grad.mul_(factor)

    def add_to_gradient(self, term: Tensor, alpha: float = 1.0) -> None:
        """Adds ``alpha`` times the gradients of a further term of the clients' objectives, shape (m, d) or (d,)."""
        self.grad.add_(term, alpha=alpha)


class Lanes:
    """Matrices that are allocated once and reused by every chunk of clients.

    Args:
        capacity: Most clients that train at once, n.

    Attributes:
        held: The part of the vectors that the phase leaves as it is.
        weights: Live weights, shape (n, d + p): those of the shared parameters, then the clients' personal ones.
        gradients: Their gradients at the current step, of the same shape.
        buffers: Buffers by name, shape (n, ...).
        optimizer: Steps the weights of the active lanes, or the part of them that the phase trains.
        active: How many lanes, the first ones, take the current step.
    """

    def __init__(self, state: TrainState, capacity: int) -> None:
        self.state, self.capacity, vector = state, capacity, state.vector
        self.weights = vector.data.new_empty(capacity, vector.all_numel)
        self._shared = slice(vector.numel)
        self.gradients = torch.zeros_like(self.weights)
        self._flat = partial(FlatOptimizer, state.optimizer.optimizer, vector, self.weights, self.gradients, fuse=True)
        self.optimizer = self._flat()
        self._optimizers = [self.optimizer]
        self.held: list[slice] = []
        live = state.buffers.live.tensors()
        self.buffers = {name: b.unsqueeze(0).repeat(capacity, *[1] * b.ndim) for name, b in live.items()}
        self.active = self._count = 0
        self._further = self.weights.new_empty(0)
        self._origins: dict[int, Tensor] = {}
        self._shifts: dict[int, Tensor] = {}
        self._start = self._origin = state.weights
        self._displacement: Tensor | None = None
        self._deltas, self._measured = self.matrix(), False
        self._factors: Tensor | None = None
        self._before = self.weights.new_empty(0)

    def matrix(self) -> Tensor:
        """Returns a new matrix of one vector for each lane, in the dtype of the global vector."""
        return self.state.weights.new_empty(self.capacity, self.state.weights.numel())

    def start(self, clients: tuple[Client, ...], weights: Tensor) -> None:
        """Loads the global model, with what each client has of its own, into the first lanes."""
        self.active = self._count = count = len(clients)
        self._measured, self._origins, self._shifts = False, {}, {}
        self.weights[:count, self._shared].copy_(weights)
        for client, own in zip(clients, self.personal, strict=False) if self.state.num_personal else ():
            self.state.load_own(client.id, own)
        values = self.state.buffers.values
        copy_each((self.buffers[name][:count] for name in values), values.values())

    @property
    def personal(self) -> Tensor:
        """The live personal weights, shape (n, p)."""
        return self.weights[:, self._shared.stop :]

    @property
    def further_gradients(self) -> Tensor:
        """Where gradients go that are added to those of the current step, shape (n, d)."""
        if not len(self._further):
            self._further = torch.empty_like(self.weights)
        return self._further

    def take_start(self, lane: int, start: Tensor) -> None:
        """Copies where a client starts, after its hooks, to its lane: weights, origin, displacement, buffers."""
        state = self.state
        self.weights[lane].copy_(state.vector.all_data)
        if state.origin is not start:
            self._origins[lane] = state.origin
        if state.displacement is not None:
            self._shifts[lane] = state.displacement
        live = state.buffers.live.tensors()
        copy_each((self.buffers[name][lane] for name in live), live.values())

    def close_start(self, start: Tensor) -> None:
        """Arranges origins and displacements as matrices, where clients have any."""
        self._start, self._origin, self._displacement = start, start, None
        if self._origins:
            self._origin = torch.stack([self._origins.get(lane, start) for lane in range(self._count)])
        if self._shifts:
            none = torch.zeros_like(self.state.weights)
            self._displacement = torch.stack([self._shifts.get(lane, none) for lane in range(self._count)])

    def origin_of(self, lane: int) -> Tensor:
        """Returns the point from which a client's update is measured, shape (d,)."""
        return self._origins.get(lane, self._start)

    def ends(self, lanes: Tensor) -> Tensor:
        """Returns where the clients of some lanes ended, without a displacement of their start, shape (m, d + p)."""
        ends = self.weights[lanes]
        if self._origin is self._start:
            return ends
        origins = self._origin[lanes]
        displaced = (origins != self._start).any(dim=1, keepdim=True)  # of 0 it must leave no rounding
        shared = ends[:, self._shared]
        shared.copy_(torch.where(displaced, shared - origins + self._start, shared))
        return ends

    def alternate(self) -> None:
        """Lets first steps train the personal part alone, the head, and the others the shared part, the body."""
        shared = len(self.state.vector.names)
        self._optimizers = [self._flat(part=part) for part in (slice(shared, None), slice(shared))]

    def start_phase(self, body: bool) -> None:
        """Lets all lanes begin to train, with a fresh optimizer: the head before the body where they take turns."""
        self.active = self._count
        self.optimizer = self._optimizers[-1 if body else 0]
        self.optimizer.start(self._count)
        shared = self._shared.stop
        if len(self._optimizers) > 1:
            self.held = [slice(shared, self.weights.shape[1]) if body else slice(shared)]

    def take_rates(self, factors: list[float]) -> None:
        """Sets the clients' factors on the learning rate."""
        self._factors = None
        if any(factor != 1 for factor in factors):
            self._factors = self.weights.new_tensor(factors)[:, None]
            if not len(self._before):
                self._before = torch.empty_like(self.weights)

    def step(self) -> None:
        """Steps the active lanes, each scaled by its factor: these optimizers' steps are proportional to the rate."""
        if self._factors is None:
            self.optimizer.step()
            return
        weights, before = self.weights[: self.active], self._before[: self.active]
        before.copy_(weights)
        self.optimizer.step()
        torch.lerp(before, weights, self._factors[: self.active], out=weights)

    def narrow(self, count: int) -> None:
        """Lets only the first ``count`` lanes take further steps."""
        if count < self.active:
            self.optimizer.narrow(count)
        self.active = count

    def gradient_points(self, lanes: slice) -> Tensor:
        """Returns the weights at which gradients of some lanes are taken, shape (m, d + p)."""
        weights = self.weights[lanes]
        if self._displacement is None:
            return weights
        moved = weights[:, self._shared] - self._displacement[lanes].to(weights.dtype)
        return torch.cat([moved, self.personal[lanes]], dim=1) if self.state.num_personal else moved

    def clip(self, clip_val: float, algorithm: Literal["norm", "value"], untrained: list[slice]) -> None:
        """Clips each client's gradient over what the optimizer trains, as torch clips that of one."""
        gradients = self.gradients[: self.active]
        for part in (*untrained, *self.held):  # nothing steps there
            gradients[:, part] = 0
        if algorithm == "value":
            gradients.clamp_(-clip_val, clip_val)
            return
        norms: Tensor = torch.linalg.vector_norm(gradients, dim=1)
        gradients.mul_((clip_val / (norms + 1e-6)).clamp_(max=1.0)[:, None])

    def deltas(self) -> Tensor:
        """Returns δ_i of every lane, shape (n, d), in the dtype of the global vector."""
        deltas = self._deltas[: self._count]
        if not self._measured:
            deltas.copy_(self.weights[: self._count, self._shared]).sub_(self._origin)
            self._measured = True
        return deltas

    @contextmanager
    def of(self, lanes: int | slice, callbacks: Sequence[FederatedCallback]) -> Iterator[None]:
        """Within the block callbacks work on the vectors of one client, or of some."""
        for callback in callbacks:
            callback.lanes = (self.capacity, lanes)
        try:
            yield
        finally:
            for callback in callbacks:
                callback.lanes = None

    @contextmanager
    def stacked(self, callbacks: Sequence[FederatedCallback]) -> Iterator[None]:
        """Within the block callbacks work on the vectors of all active clients at once."""
        state, count = self.state, self.active
        vector = state.vector
        origin = self._origin if self._origin is self._start else self._origin[:count]
        live, gradients = self.weights[:count, self._shared], self.gradients[:count, self._shared]
        state.vector = StackedVector(live, gradients, self.personal[:count])  # type: ignore[assignment]  # stands in
        state.origin = origin
        try:
            with self.of(slice(0, count), callbacks):
                yield
        finally:
            state.vector = vector


def keep_freed_memory() -> None:
    """Lets glibc keep large matrices that steps free, unless environment variables already set this."""
    if platform.libc_ver()[0] == "glibc" and not any(name in os.environ for name in _CHOSEN_BY_USER):
        for option, value in _OPTIONS:
            ctypes.CDLL(None).mallopt(option, value)
