"""A fleet: what the server needs of whoever brings packets to nodes, and what the nodes say of their clients."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt
from lightning.pytorch.utilities import rank_zero_warn

from lightning_fed.engines.fleet.packets import unpack
from lightning_fed.errors import expect

__all__ = ["Census", "Fleet"]

_MOST_CLIENTS = 1 << 24


class Fleet(Protocol):
    """Brings packets to the nodes where clients are, and their replies back; it need not read them.

    One that adds up what nodes send, so that the server sees no single update, has ``sums_only = True``: its ``ask``
    returns replies without tensors, and by the name "" a packet with the sums of those of all nodes that replied.
    With ``evaluates = "nodes"`` or ``"both"`` models are evaluated on what nodes hold out.
    """

    def hello(self) -> Mapping[str, bytes]:
        """Returns what each node that is there now says of itself (``Node.hello``), by the node's name."""

    def ask(self, packets: Mapping[str, bytes]) -> Mapping[str, bytes | str]:
        """Sends each node its packet and returns the replies, once all are there or time is up.

        A node that has not replied is left out, or has a text that says why.
        """


class Census:
    """The clients of all nodes, as these say when a run begins.

    Attributes:
        homes: The node of each client.
        sizes: Training samples of each client, shape (N,), 0 of an id that no node has.
        held_out: Samples held out of each, shape (N,), 0 where nobody asks for them.
        classes: Training samples of each client and class, shape (N, C); None if a node knows no labels.
        batch_size: Samples in a batch.
        drop_last: Whether short last batches are left out.
    """

    def __init__(self, said: Mapping[str, bytes]) -> None:
        expect(said, "Expected a fleet with nodes when the run begins, got none: start a node first.")
        read = [_Said(node, packet) for node, packet in said.items()]
        size = 1 + max(max(one.clients) for one in read)
        self.homes: dict[int, str] = {}
        self.sizes, self.held_out = np.zeros((2, size), dtype=np.int64)
        self.batch_size, self.drop_last = read[0].batches  # a node with others cannot take part
        for one in read:
            for client in one.clients:
                other = self.homes.setdefault(client, one.node)
                expect(
                    other == one.node,
                    f"Expected each client at one node, got client {client} at {other} and {one.node}.",
                )
            self.sizes[one.clients], self.held_out[one.clients] = one.sizes, one.held_out
        tables = [(one.clients, one.classes) for one in read if one.classes is not None]
        self.classes: npt.NDArray[np.int64] | None = None
        if len(tables) == len(read):
            self.classes = np.zeros((size, max(table.shape[1] for _, table in tables)), dtype=np.int64)
            for clients, table in tables:
                self.classes[clients, : table.shape[1]] = table
        if gaps := size - len(self.homes):
            first = next(client for client in range(size) if client not in self.homes)
            rank_zero_warn(
                f"No node has {gaps} of the {size} clients, such as client {first}, so rounds that draw them train "
                "fewer: number clients without gaps, or wait for more `nodes`."
            )

    def look_again(self, said: Mapping[str, bytes]) -> None:
        """Notes where clients are now; those that the run does not know wait for the next one."""
        there = set(said)
        for node, packet in said.items():
            try:
                one = _Said(node, packet)
            except Exception as error:  # whatever somebody sends who is no node
                rank_zero_warn(f"{node} is not taken for a node of the fleet: {error}")
                continue
            for client, size in zip(one.clients, one.sizes.tolist(), strict=True):
                known = client < len(self.sizes) and self.sizes[client] == size
                if known and self.homes.get(client) not in there - {node}:
                    self.homes[client] = node


class _Said:
    """What one node says of itself."""

    def __init__(self, node: str, packet: bytes) -> None:
        facts, tensors = unpack(packet)
        self.node, self.clients = node, facts["clients"]
        ids, counts = set(self.clients), (facts["sizes"], facts["held_out"])
        is_list = bool(ids) and len(ids) == len(self.clients)
        is_list &= all(type(each) is int and 0 <= each < _MOST_CLIENTS for each in (*ids, *counts[0], *counts[1]))
        expect(
            is_list and all(len(ids) == len(count) for count in counts),
            f"Expected node {node} to say each of its clients once, with its samples, got {str(facts)[:200]}.",
        )
        self.sizes, self.held_out = (np.array(count, dtype=np.int64) for count in counts)
        self.batches: tuple[int, bool] = facts["batch_size"], facts["drop_last"]
        classes = tensors.get("classes")
        self.classes = None if classes is None else classes.long().numpy().reshape(len(ids), -1)
        fits = self.classes is None or (self.classes.min() >= 0 and float(self.classes.sum()) < 1 << 28)
        expect(fits, f"Expected node {node} to count its samples of each class, got other numbers.")
