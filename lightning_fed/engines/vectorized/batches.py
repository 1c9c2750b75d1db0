"""Which batches clients trained at once get at each step."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import default_collate

from lightning_fed.core.devices import to_device
from lightning_fed.core.seeding import Purpose, seed_for, seeds_for
from lightning_fed.core.train_state import LocalOptions, TrainState
from lightning_fed.core.updates import Client
from lightning_fed.core.user_code import BatchTransfer
from lightning_fed.data import AugmentedSource, TensorSource
from lightning_fed.data.skews import SkewedSource
from lightning_fed.engines.client_batches import Phases, local_steps, read_batches, samples_in_epoch, send_order

__all__ = ["BatchGroup", "LaneBatches", "gathers"]


@dataclass(frozen=True)
class BatchGroup:
    """Neighbouring clients whose batches of one step have the same size.

    Attributes:
        lanes: The clients.
        batch: Their batches; tensors of shape (m, b, ...).
        batch_idx: Number of the batch within the epoch (of the first client, where that differs).
        size: b.
        first: Whether it is the first batch of a step, which takes several where gradients are accumulated.
    """

    lanes: slice
    batch: Any
    batch_idx: int
    size: int
    first: bool = True


class LaneBatches:
    """Orders clients in lanes so that those that still train, and those with batches of one size, are neighbours.

    Each client gets the same samples in the same order as when it trains alone; no batch is padded or dropped.

    Args:
        state: What ``fit`` works on: gives seed and batches.
        options: Local epochs or steps, and batches of a step.
        clients: The clients.
        by_index: Whether batches with different numbers within the epoch must be apart.
        whole: If given, one pass over all samples, in order, not augmented, in batches of this size (full gradients).
        phases: Says which first steps of a client train its personal part alone. All lanes take these before any of
            them goes on, so that the lanes that take a step are the first ones in both phases.

    Attributes:
        gathers: Whether batches are gathered from tensors, not read one by one.
        order: For each lane the place of its client among those given.
        clients: The clients in the order of lanes.
        steps: Local steps of each lane, never increasing.
        head: The first of them, which train the personal part alone, 0 where there is no such phase.
        rounds: Steps of all lanes: as many as it takes until each has taken its own.
        samples: Samples that all their local steps go through.
    """

    def __init__(
        self,
        state: TrainState,
        options: LocalOptions,
        clients: tuple[Client, ...],
        by_index: bool,
        whole: int | None = None,
        phases: Phases | None = None,
    ) -> None:
        source, transfer = state.source, state.transfer
        if whole is not None:
            source = getattr(source, "unaugmented", source)
        self._seed, self._source, self._transfer, self._by_index = state.seed, source, transfer, by_index
        self._whole, self._size = whole is not None, whole or source.batch_size
        sizes = np.array([client.num_samples for client in clients])
        samples = sizes if self._whole else samples_in_epoch(source, sizes)
        in_epoch = -(-samples // self._size)
        self._window = 1 if self._whole else max(1, min(options.accumulate_grad_batches, int(in_epoch.max())))
        steps = in_epoch if self._whole else local_steps(source, options, sizes)
        own = [None if self._whole else client.steps for client in clients]
        steps = np.where([s is not None for s in own], [s or 0 for s in own], steps)
        last = samples - (in_epoch - 1) * self._size
        order = np.lexsort((np.arange(len(clients)), -last, -in_epoch, -steps))
        self.order: list[int] = order.tolist()
        self.clients = tuple(clients[at] for at in order)
        self.steps: list[int] = steps[order].tolist()
        self._head = np.zeros_like(sizes) if phases is None else phases.head_steps(sizes)[order]
        self.head: list[int] = self._head.tolist()
        self._rest = steps[order] - self._head
        self.rounds = self.head[0] + int(self._rest[0])
        self._in_epoch, self._last, self._trained = in_epoch[order], last[order], samples[order]
        self._steps_in_epoch = -(-self._in_epoch // self._window)
        if not self._whole:
            seeds = seeds_for(self._seed, Purpose.SHUFFLE, clients[0].round, [client.id for client in self.clients])
            self._orders = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.gathers = gathers(source, transfer)
        self._epochs: list[list[Any]] = [[] for _ in clients]
        self._planned = self._plan() if self.gathers else None
        self.samples = 0

    def active(self, step: int) -> int:
        """Number of lanes that take this step, counted from 0; they are the first ones."""
        return len(self._own_steps(step))

    def _own_steps(self, step: int) -> npt.NDArray[np.int64]:
        """Returns which of its own steps each lane that takes this one has got to."""
        first = self.head[0]
        if step < first:
            return np.full(np.count_nonzero(self._head > step), step)
        return self._head[: np.count_nonzero(self._rest > step - first)] + (step - first)

    def groups(self, step: int) -> Iterator[BatchGroup]:
        """Yields the batches of a step; call for every step in turn."""
        if self._planned is None:
            self._begin_epochs(step)
        for part, lanes, index, size in self._bounds(step):
            count = (lanes.stop - lanes.start) * size
            if self._planned is None:
                lane_batches = zip(self._epochs[lanes], index.tolist(), strict=True)
                batch = default_collate([batches[at] for batches, at in lane_batches])
            else:
                now = slice(self.samples, self.samples + count)
                samples = self._source.gather(*(part[now] for part in self._planned))
                batch = tree_map(lambda part, size=size: part.reshape(-1, size, *part.shape[1:]), samples)
                batch = batch if self._transfer is None else self._transfer(batch, 0)
            self.samples += count
            yield BatchGroup(lanes, batch, int(index[0]), size, first=part == 0)

    def _bounds(self, step: int) -> Iterator[tuple[int, slice, npt.NDArray[np.int64], int]]:
        """Yields place in the step, lanes, number of the batch within each one's epoch, and size of its batches."""
        own = self._own_steps(step)
        count = len(own)
        in_epoch = self._in_epoch[:count]
        for part in range(self._window):
            index = own % self._steps_in_epoch[:count] * self._window + part
            sizes = np.where(index == in_epoch - 1, self._last[:count], self._size)
            sizes[index >= in_epoch] = 0  # the epoch has ended before the window is full
            differs = np.diff(sizes) != 0
            if self._by_index or not self.gathers:
                differs |= np.diff(index) != 0
            if not self.gathers:  # a transfer hook may return batches of different shapes
                kinds = [_kind(self._epochs[at][index[at]]) if sizes[at] else None for at in range(count)]
                differs |= np.array([a != b for a, b in pairwise(kinds)], dtype=bool)
            bounds = [0, *(np.flatnonzero(differs) + 1).tolist(), count]
            for a, b in pairwise(bounds):
                if sizes[a]:
                    yield part, slice(a, b), index[a:b], int(sizes[a])

    def _plan(self) -> list[Tensor]:
        """Lists the samples of all batches of all steps, in the order of use, and sends the list in one copy."""
        epochs: list[Tensor] = []
        parts, shape = [], (len(self.clients), int(self._trained.max()))
        for step in range(self.rounds):
            for lane in self._beginning(step):
                own = self._source.plan(self.clients[lane].id, self._shuffled(lane), self._read_seed(lane, step))
                epochs = epochs or [part.new_zeros(*shape, *part.shape[1:]) for part in own]
                for all_lanes, part in zip(epochs, own, strict=True):
                    all_lanes[lane, : len(part)] = part
            for _, lanes, index, size in self._bounds(step):
                parts.append([_batches(part[lanes], index * self._size, size) for part in epochs])
        return [to_device(torch.cat(part), self._source.order_device) for part in zip(*parts, strict=True)]

    def _beginning(self, step: int) -> list[int]:
        """Returns the lanes that begin an epoch at this step."""
        own = self._own_steps(step)
        lanes: list[int] = np.flatnonzero(own % self._steps_in_epoch[: len(own)] == 0).tolist()
        return lanes

    def _shuffled(self, lane: int) -> Tensor:
        """Shuffles the samples of a lane for its next epoch, as when it trains alone."""
        count = self.clients[lane].num_samples
        if self._whole:
            return torch.arange(count)
        return torch.randperm(count, generator=self._orders[lane])[: int(self._trained[lane])]

    def _begin_epochs(self, step: int) -> None:
        """Reads the batches of lanes that begin an epoch."""
        lanes, own = self._beginning(step), self._own_steps(step)
        for lane in lanes:
            order = send_order(self._source, self._shuffled(lane))
            # Read completely now: a data loader can prepare the batches of only one client at a time.
            batches = read_batches(self._source, self.clients[lane].id, order, self._read_seed(lane, step), self._size)
            if (left := self.steps[lane] - int(own[lane])) < self._steps_in_epoch[lane]:
                batches = islice(batches, left * self._window)
            self._epochs[lane] = [b if self._transfer is None else self._transfer(b, 0) for b in batches]

    def _read_seed(self, lane: int, step: int) -> int:
        """Returns the seed for reading the epoch that a lane begins at this step; tensors need none."""
        client, epoch = self.clients[lane], int(self._own_steps(step)[lane]) // int(self._steps_in_epoch[lane])
        purpose, index = (Purpose.GRADIENT, None) if self._whole else (Purpose.READ, epoch)
        return seed_for(self._seed, purpose, client.round, client.id, index) if self._source.reads_are_seeded else 0


def gathers(source: Any, transfer: BatchTransfer | None) -> bool:
    """Returns whether samples of several clients can be gathered at once; subclasses may read differently."""
    while (
        type(source) is SkewedSource
        or (type(source) is AugmentedSource and source.by_sample is not None)
        or getattr(source, "renumbers", False)
    ):
        source = source.inner
    return type(source) is TensorSource and (transfer is None or transfer.converts)


def _batches(epochs: Tensor, starts: npt.NDArray[np.int64], size: int) -> Tensor:
    """Takes a batch of ``size`` from each lane's epoch, shape (m, samples, ...), as one list of samples."""
    if (starts == starts[0]).all():  # copied, because the next epoch overwrites it
        return epochs[:, int(starts[0]) : int(starts[0]) + size].clone().flatten(0, 1)
    places = torch.from_numpy(starts)[:, None] + torch.arange(size)
    return epochs[torch.arange(len(epochs))[:, None], places].flatten(0, 1)


def _kind(batch: Any) -> Any:
    """Returns what must be equal in two batches that are stacked."""
    leaves, structure = tree_flatten(batch)
    return structure, [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]
