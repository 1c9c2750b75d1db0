"""Decides which process trains which client of a round, and moves client state there."""

from collections.abc import Sequence
from heapq import heapreplace
from typing import Any

from lightning_fed.core.buffers import GlobalBuffers
from lightning_fed.core.client_states import ClientStates
from lightning_fed.core.updates import Client, Cohort
from lightning_fed.distributed.processes import Processes

__all__ = ["Assignment", "assign_clients"]


def assign_clients(clients: Sequence[Client], size: int, most: int | None = None) -> list[tuple[Client, ...]]:
    """Divides clients over processes: the largest client first, each to the process with the least work so far.

    The result depends only on the arguments; ties go to the smaller client id and the smaller rank. The busiest process
    gets at most 4/3 of the work of the busiest process in the best division (Graham, 1969). A client counts at most
    ``most`` samples, for when all clients take the same number of steps. Client ids ascend within each process.
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
    """Divides the cohort of each round, and moves client state to the process that trains the client next.

    The newest state of a client is in the process that trained it last, or in the files of the checkpoint that the run
    was resumed from, which all processes can read.

    Args:
        processes: The processes of the run.
        keepers: The objects that hold client state, already restored.
        most: See ``assign_clients``.
    """

    def __init__(
        self, processes: Processes, keepers: tuple[ClientStates | GlobalBuffers, ...], most: int | None = None
    ) -> None:
        self._processes, self._keepers, self._most = processes, keepers, most
        self._shares: list[tuple[Client, ...]] = []
        self._targets: dict[int, int] = {}
        self._holders: dict[int, int] = {}
        self._in_use = self.keeps  # after a restart all processes read the same files

    @property
    def keeps(self) -> bool:
        """Whether this process holds any client state."""
        return any(keeper.in_use for keeper in self._keepers)

    def own(self, cohort: Cohort) -> tuple[Client, ...]:
        """Returns the clients of the cohort that this process trains, after their state has arrived here."""
        if self._processes.size == 1:
            return cohort.clients
        self._shares = assign_clients(cohort.clients, self._processes.size, self._most)
        self._targets = {client.id: target for target, share in enumerate(self._shares) for client in share}
        if self._in_use:
            self._hand_over()
        return self._shares[self._processes.rank]

    def elsewhere(self, client: int) -> bool:
        """Says whether another process trains a client in this round, or has its state from an earlier round."""
        rank = self._processes.rank
        return self._targets.get(client, self._holders.get(client, rank)) != rank

    def take_note(self, keep: Sequence[bool]) -> None:
        """Records after a round which processes hold client state; while none does, there is nothing to move."""
        self._in_use = any(keep)
        if self._in_use:
            for rank, share in enumerate(self._shares):
                self._holders.update((client.id, rank) for client in share)

    def _hand_over(self) -> None:
        """Moves client state from the process that has it to the one that trains the client; others drop their copy.

        All processes receive it in an exchange; a process that fails to provide it sends its error instead.
        """
        rank = self._processes.rank
        targets = self._targets
        moving = [client for client, target in targets.items() if self._holders.get(client, target) != target]
        everyone: list[dict[int, list[Any]]] = []
        if moving:
            own = [client for client in moving if self._holders[client] == rank]
            moved = {client: [keeper.move_out(client) for keeper in self._keepers] for client in own}
            everyone = self._processes.exchange(moved, "client state")
        for client, target in targets.items():
            if target != rank:
                for keeper in self._keepers:
                    keeper.drop(client)
        arrived = {client: parts for part in everyone for client, parts in part.items() if targets[client] == rank}
        for client, parts in arrived.items():
            for keeper, part in zip(self._keepers, parts, strict=True):
                keeper.move_in(client, part)
