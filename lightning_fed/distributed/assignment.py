"""Which process trains which client of a round, and how what a client keeps gets there."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from lightning_fed.core.updates import Client, Cohort
from lightning_fed.distributed.parcels import pack, room_for, unpack

if TYPE_CHECKING:
    from lightning_fed.core.buffers import GlobalBuffers
    from lightning_fed.core.client_states import ClientStates
    from lightning_fed.trainer import FederatedTrainer

__all__ = ["Assignment", "assign_clients"]

_Move: TypeAlias = tuple[int, int]  # from one process to another


def assign_clients(clients: Sequence[Client], size: int, most: int | None = None) -> list[tuple[Client, ...]]:
    """Divides clients over processes: the largest first, each to the process with the least work so far.

    A pure function of its arguments; ties go to the smaller client id and the smaller rank. The busiest process gets at
    most 4/3 of the work of the busiest one in the best division (Graham, 1969).

    Args:
        clients: The clients of a round.
        size: Number of processes.
        most: Samples that make the most work, where all clients take the same number of steps; None for no bound.

    Returns:
        The clients of each process, in ascending order of id.
    """

    def work(client: Client) -> int:
        return client.num_samples if most is None else min(client.num_samples, most)

    loads = [(0, rank) for rank in range(size)]
    shares: list[list[Client]] = [[] for _ in range(size)]
    for client in sorted(clients, key=lambda client: (-work(client), client.id)):
        load, rank = loads[0]
        shares[rank].append(client)
        heapreplace(loads, (load + work(client), rank))
    return [tuple(sorted(share, key=lambda client: client.id)) for share in shares]


class Assignment:
    """Divides the cohort of each round, and brings what clients keep to the process that trains them next.

    Where a client's newest state lies follows from the rounds so far: with the process that had it last, or in the
    files of the checkpoint that the run was resumed from, which all can read.

    Args:
        trainer: The trainer, set up for ``fit`` and restored.
    """

    def __init__(self, trainer: FederatedTrainer) -> None:
        self._processes = trainer.processes
        self._most = trainer.source.batch_size if trainer.local_steps is not None else None
        self._keepers: tuple[ClientStates | GlobalBuffers, ...] = (trainer.client_states, trainer.buffers)
        self._shares: list[tuple[Client, ...]] = []
        self._holders: dict[int, int] = {}
        self._in_use = self.keeps  # after a restart all read the same files

    @property
    def keeps(self) -> bool:
        """Whether this process holds anything that clients keep."""
        return any(keeper.in_use for keeper in self._keepers)

    def own(self, cohort: Cohort) -> tuple[Client, ...]:
        """Returns the clients of the cohort that this process trains, with all that they keep."""
        if self._processes.size == 1:
            return cohort.clients
        self._shares = assign_clients(cohort.clients, self._processes.size, self._most)
        if self._in_use:
            self._hand_over()
        return self._shares[self._processes.rank]

    def take_note(self, keep: Sequence[bool]) -> None:
        """Takes note, after a round, of which processes hold anything: while none does, there is nothing to move."""
        self._in_use = any(keep)
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
