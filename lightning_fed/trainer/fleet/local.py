"""A fleet whose nodes are in the process of the server: to try a split, and to test."""

from collections.abc import Mapping
from typing import Literal

from lightning_fed.engines.fleet.packets import Tensors, pack, unpack
from lightning_fed.trainer.fleet.node import Node

__all__ = ["LocalFleet", "SummingFleet"]


class LocalFleet:
    """Hands packets to nodes in this process, one after the other, as a network would.

    Args:
        nodes: The nodes by name.
        evaluates: Where the model is evaluated: on the data of the server, on what nodes hold out, or both.
    """

    def __init__(self, nodes: Mapping[str, Node], evaluates: Literal["server", "nodes", "both"] = "server") -> None:
        self.nodes, self.evaluates = dict(nodes), evaluates

    def hello(self) -> dict[str, bytes]:
        """Returns what each node says of itself."""
        return {name: node.hello() for name, node in self.nodes.items()}

    def ask(self, packets: Mapping[str, bytes]) -> dict[str, bytes | str]:
        """Returns each node's reply."""
        return {name: self.nodes[name].answer(packet) for name, packet in packets.items() if name in self.nodes}

    def close(self) -> None:
        """Ends the run at all nodes."""
        for node in self.nodes.values():
            node.close()


class SummingFleet(LocalFleet):
    """A fleet that shows the server sums over nodes alone, as secure aggregation does; here nothing is secret."""

    sums_only = True

    def ask(self, packets: Mapping[str, bytes]) -> dict[str, bytes | str]:
        """Returns each node's counts, and by the name "" the sums over all nodes."""
        read = {name: unpack(reply) for name, reply in super().ask(packets).items() if isinstance(reply, bytes)}
        sums: Tensors = {}
        for _, tensors in read.values():
            sums |= {name: sums[name] + value if name in sums else value for name, value in tensors.items()}
        return {"": pack({}, sums), **{name: pack(facts, {}) for name, (facts, _) in read.items()}}
