"""Which process trains which client of a round, and how what a client keeps gets there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_fed.core.updates import Client, Cohort
from lightning_fed.distributed.parcels import pack, room_for, unpack

if TYPE_CHECKING:
    from lightning_fed.core.buffers import GlobalBuffers
    from lightning_fed.core.client_states import ClientStates
    from lightning_fed.trainer import FederatedTrainer

__all__ = ["Assignment", "Trained", "assign_clients", "smooth_speeds"]

_Move: TypeAlias = tuple[int, int]  # from one process to another
# How far a process that has nothing to do comes nearer to the fastest in a round.
_AGAIN = 0.1


class Trained(NamedTuple):
    """What one process says of its share of a round.

    Attributes:
        keeps: Whether it holds anything that clients keep.
        work: Samples of the clients that it trained, as ``assign_clients`` counts them.
        seconds: What that took it.
    """

    keeps: bool
    work: int
    seconds: float


def assign_clients(
    clients: Sequence[Client], size: int, most: int | None = None, speeds: Sequence[float] | None = None
) -> list[tuple[Client, ...]]:
    """Divides clients over processes: the largest first, each to the process that would be done with it first.

    A pure function of its arguments; ties go to the smaller client id and the smaller rank. For equal speeds the
    busiest process gets at most 4/3 of the work of the busiest one in the best division (Graham, 1969); for others it
    takes at most 2 m / (m + 1) of the time, with m processes (Gonzalez, Ibarra and Sahni, 1977).

    Args:
        clients: The clients of a round.
        size: Number of processes.
        most: Samples that make the most work, where all clients take the same number of steps; None for no bound.
        speeds: Samples per second of each process, above 0; None for equal ones.

    Returns:
        The clients of each process, in ascending order of id.
    """
    work = [(_work(client, most), client) for client in clients]
    work.sort(key=lambda each: (-each[0], each[1].id))
    ranks = _by_load([samples for samples, _ in work], size, speeds)
    shares: list[list[Client]] = [[] for _ in range(size)]
    for rank, (_, client) in zip(ranks, work, strict=True):
        shares[rank].append(client)
    return [tuple(sorted(share, key=lambda client: client.id)) for share in shares]


def _work(client: Client, most: int | None) -> int:
    return client.num_samples if most is None else min(client.num_samples, most)


def _by_load(work: list[int], size: int, speeds: Sequence[float] | None) -> Iterator[int]:
    """Yields the process that each piece of work goes to, one after the other."""
    if speeds is None:
        loads = [(0, rank) for rank in range(size)]
        heapify(loads)
        for samples in work:
            load, rank = loads[0]
            yield rank
            heapreplace(loads, (load + samples, rank))
        return
    sums, pace = np.zeros(size), np.array(speeds)
    for samples in work:
        first = int(np.argmin((sums + samples) / pace))
        yield first
        sums[first] += samples


def smooth_speeds(speeds: Sequence[float] | None, trained: Sequence[Trained]) -> list[float] | None:
    """Takes a round into account: a process's speed is the mean of its former one and that of the round.

    A process that trained nobody comes a tenth nearer to the fastest, so that it is tried again in the end: one that
    was slow for a while would never be asked otherwise.

    Args:
        speeds: Samples per second of each process so far, None before the first round.
        trained: What each said of the round.

    Returns:
        The new speeds, None while no process has trained anybody.
    """
    shown = [part.work / part.seconds if part.work and part.seconds > 0 else None for part in trained]
    fastest = max([*(speeds or ()), *(speed for speed in shown if speed is not None)], default=None)
    if fastest is None:
        return None
    if speeds is None:  # nobody knows of those that trained nobody
        return [fastest if speed is None else speed for speed in shown]
    return [
        old + _AGAIN * (fastest - old) if speed is None else (old + speed) / 2
        for old, speed in zip(speeds, shown, strict=True)
    ]


class Assignment:
    """Divides the cohort of each round, and brings what clients keep to the process that trains them next.

    Where a client's newest state lies follows from the rounds so far: with the process that had it last, or in the
    files of the checkpoint that the run was resumed from, which all can read. Speeds are those that all processes have
    said of themselves, so that each divides alike.

    Args:
        trainer: The trainer, set up for ``fit`` and restored.
    """

    def __init__(self, trainer: FederatedTrainer) -> None:
        self._processes = trainer.processes
        self._most = trainer.source.batch_size if trainer.local_steps is not None else None
        self._measures = trainer.balance == "measured" and self._processes.size > 1
        self._speeds: list[float] | None = None
        self._trained = (0, 0.0)
        self._keepers: tuple[ClientStates | GlobalBuffers, ...] = (trainer.client_states, trainer.buffers)
        self._shares: list[tuple[Client, ...]] = []
        self._holders: dict[int, int] = {}
        self._in_use = self._keeps()  # after a restart all read the same files
        if self._measures:
            rank_zero_info(
                "With `--trainer.balance measured` the clock decides which process trains which client: results are "
                "the same up to rounding, but no longer bit for bit."
            )

    def _keeps(self) -> bool:
        return any(keeper.in_use for keeper in self._keepers)

    def own(self, cohort: Cohort) -> tuple[Client, ...]:
        """Returns the clients of the cohort that this process trains, with all that they keep."""
        if self._processes.size == 1:
            return cohort.clients
        self._shares = assign_clients(cohort.clients, self._processes.size, self._most, self._speeds)
        if self._in_use:
            self._hand_over()
        return self._shares[self._processes.rank]

    @contextmanager
    def timing(self, clients: Sequence[Client]) -> Iterator[None]:
        """Measures, within the block, how long this process trains its clients."""
        started = time.perf_counter()
        yield
        self._trained = sum(_work(client, self._most) for client in clients), time.perf_counter() - started

    @property
    def trained(self) -> Trained:
        """What this process has to say of its share of the round."""
        return Trained(self._keeps(), *self._trained)

    def take_note(self, trained: Sequence[Trained]) -> None:
        """Takes note, after a round, of what each process said: while none holds anything, there is nothing to move."""
        if self._measures:
            self._speeds = smooth_speeds(self._speeds, trained)
        self._in_use = any(part.keeps for part in trained)
        if self._in_use:
            for rank, share in enumerate(self._shares):
                self._holders.update((client.id, rank) for client in share)

    def _hand_over(self) -> None:
        """Moves what clients keep, from each process to each other one in turn; the rest forget what they had.

        What can fail on one process comes before the exchange, which tells the others, or after the last move: in
        between they would wait for it for ever, so one that fails all the same breaks their wait.
        """
        rank, moving = self._processes.rank, self._moves()
        parcels = {move: pack(self._take(clients), move[1]) for move, clients in moving.items() if move[0] == rank}
        arrived: list[tuple[int, Any]] = []
        if moving:
            own = {move: len(parcel) for move, parcel in parcels.items()}
            sizes = {
                move: size for part in self._processes.exchange(own, "client state") for move, size in part.items()
            }
            with self._processes.waited_for():
                carried = self._carry(parcels, sizes)
            while carried:
                move, packed = carried.popitem()
                arrived.extend(zip(moving[move], unpack(packed), strict=True))
        for target, share in enumerate(self._shares):
            if target != rank:
                for client in share:
                    for keeper in self._keepers:
                        keeper.forget(client.id)
        while arrived:  # each is let go of once it is kept
            self._give(*arrived.pop())

    def _moves(self) -> dict[_Move, list[int]]:
        """The clients whose state moves, by the process that has it and the one that needs it."""
        moving: dict[_Move, list[int]] = {}
        for target, share in enumerate(self._shares):
            for client in share:
                source = self._holders.get(client.id, target)
                if source != target:
                    moving.setdefault((source, target), []).append(client.id)
        return moving

    def _take(self, clients: list[int]) -> list[Any]:
        return [[keeper.take(i) for keeper in self._keepers] for i in clients]

    def _carry(self, parcels: dict[_Move, Tensor], sizes: dict[_Move, int]) -> dict[_Move, Tensor]:
        """Sends this process's parcels, which are let go of; returns those that came to it."""
        rank = self._processes.rank
        arrived: dict[_Move, Tensor] = {}
        for move in sorted(sizes):
            if rank == move[0]:
                self._processes.hand_over(parcels.pop(move), *move)
            elif rank == move[1]:
                arrived[move] = room_for(sizes[move])
                self._processes.hand_over(arrived[move], *move)
        return arrived

    def _give(self, client: int, parts: list[Any]) -> None:
        for keeper, part in zip(self._keepers, parts, strict=True):
            keeper.give(client, part)
