"""Which batches clients that train at the same time meet at each step."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import default_collate

from lightning_fed.core.devices import to_device
from lightning_fed.core.seeding import Purpose, seed_for, seeds_for
from lightning_fed.core.train_state import LocalOptions, TrainState
from lightning_fed.core.updates import Client
from lightning_fed.data import TensorSource
from lightning_fed.engines.client_batches import local_steps, read_batches, samples_in_epoch, send_orders

__all__ = ["BatchGroup", "LaneBatches"]


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
    """Arranges clients in lanes so that those that still train, and those with batches of one size, are neighbours.

    Each client meets the samples, in the order, that it meets when it trains alone: no batch is padded or dropped.

    Args:
        state: What ``fit`` works on: gives seed and batches.
        options: Local epochs or steps, and batches of a step.
        clients: The clients.
        by_index: Whether batches with different numbers within the epoch must be apart.
        whole: If given, one pass over all samples as they are, in order, in batches of so many, as for a full gradient.

    Attributes:
        gathers: Whether batches are gathered from tensors, not read one by one.
        order: For each lane the place of its client among those given.
        clients: The clients in the order of lanes.
        steps: Local steps of each lane, never increasing.
        samples: Samples that all their local steps go through.
    """

    def __init__(
        self,
        state: TrainState,
        options: LocalOptions,
        clients: tuple[Client, ...],
        by_index: bool,
        whole: int | None = None,
    ) -> None:
        source, transfer = state.source, state.transfer
        if whole is not None:
            source = getattr(source, "unaugmented", source)
        self._seed, self._source, self._transfer, self._by_index = state.seed, source, transfer, by_index
        self._taken = 0
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
        self._in_epoch, self._last, self._trained = in_epoch[order], last[order], samples[order]
        self._steps_in_epoch = -(-self._in_epoch // self._window)
        if not self._whole:
            ids = [client.id for client in self.clients]
            seeds = seeds_for(self._seed, Purpose.SHUFFLE, clients[0].round, ids)
            self._orders = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.gathers = type(source) is TensorSource and transfer is None  # a subclass may read otherwise
        self._epochs: list[list[Any]] = [[] for _ in clients]
        self._planned = self._plan() if self.gathers else None
        self.samples = 0

    def active(self, step: int) -> int:
        """Number of lanes that take this step, counted from 0; they are the first ones."""
        return sum(steps > step for steps in self.steps)

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
                batch = self._source.gather(self._planned[self._taken : self._taken + count].view(-1, size))
                self._taken += count
            self.samples += count
            yield BatchGroup(lanes, batch, int(index[0]), size, first=part == 0)

    def _bounds(self, step: int) -> Iterator[tuple[int, slice, npt.NDArray[np.int64], int]]:
        """Yields place in the step, lanes, number of the batch within each one's epoch, and size of its batches."""
        count = self.active(step)
        in_epoch = self._in_epoch[:count]
        for part in range(self._window):
            index = step % self._steps_in_epoch[:count] * self._window + part
            sizes = np.where(index == in_epoch - 1, self._last[:count], self._size)
            sizes[index >= in_epoch] = 0  # the epoch has ended before the window is full
            differs = np.diff(sizes) != 0
            if self._by_index or not self.gathers:
                differs |= np.diff(index) != 0
            if not self.gathers:  # what a transfer hook makes of a batch need not be of one shape
                kinds = [_kind(self._epochs[at][index[at]]) if sizes[at] else None for at in range(count)]
                differs |= np.array([a != b for a, b in pairwise(kinds)], dtype=bool)
            bounds = [0, *(np.flatnonzero(differs) + 1).tolist(), count]
            for a, b in pairwise(bounds):
                if sizes[a]:
                    yield part, slice(a, b), index[a:b], int(sizes[a])

    def _plan(self) -> Tensor:
        """Draws the rows of all batches of all steps, in the order in which they are met, and sends them at once."""
        orders = torch.zeros(len(self.clients), int(self._trained.max()), dtype=torch.int64)
        parts = []
        for step in range(self.steps[0]):
            for lane in self._beginning(step):
                samples = int(self._trained[lane])
                orders[lane, :samples] = self._shuffled(lane).add_(self._source.first_row(self.clients[lane].id))
            for _, lanes, index, size in self._bounds(step):
                at = index * self._size
                rows = orders[lanes]
                if (at == at[0]).all():
                    rows = rows[:, int(at[0]) : int(at[0]) + size].clone()  # the next epoch is written in its place
                else:
                    rows = rows.gather(1, torch.from_numpy(at)[:, None] + torch.arange(size))
                parts.append(rows.reshape(-1))
        return to_device(torch.cat(parts), self._source.device)

    def _beginning(self, step: int) -> list[int]:
        """Returns the lanes that begin an epoch with a step."""
        lanes: list[int] = np.flatnonzero(step % self._steps_in_epoch[: self.active(step)] == 0).tolist()
        return lanes

    def _shuffled(self, lane: int) -> Tensor:
        """Shuffles the samples of a lane for its next epoch, as when it trains alone."""
        count = self.clients[lane].num_samples
        if self._whole:
            return torch.arange(count)
        return torch.randperm(count, generator=self._orders[lane])[: int(self._trained[lane])]

    def _begin_epochs(self, step: int) -> None:
        """Reads the batches of lanes that begin an epoch."""
        lanes = self._beginning(step)
        orders = send_orders(self._source, [self._shuffled(lane) for lane in lanes])
        for lane, order in zip(lanes, orders, strict=True):
            client = self.clients[lane]
            purpose = Purpose.GRADIENT if self._whole else Purpose.READ
            epoch = None if self._whole else step // int(self._steps_in_epoch[lane])
            seeded = self._source.reads_are_seeded
            seed = seed_for(self._seed, purpose, client.round, client.id, epoch) if seeded else 0
            # Read at once: a data loader has the batches of one client at a time under way.
            batches = read_batches(self._source, client.id, order, seed, self._size)
            if (left := self.steps[lane] - step) < self._steps_in_epoch[lane]:
                batches = islice(batches, left * self._window)
            self._epochs[lane] = [b if self._transfer is None else self._transfer(b, 0) for b in batches]


def _kind(batch: Any) -> Any:
    """What must be the same in two batches that are put side by side."""
    leaves, structure = tree_flatten(batch)
    return structure, [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]
