"""A fleet whose nodes are in the process of the server: to try a split, and to test."""

from collections.abc import Mapping

from lightning_fed.trainer.fleet.node import Node

__all__ = ["LocalFleet"]


class LocalFleet:
    """Hands packets to nodes in this process, one after the other, as a network would.

    Args:
        nodes: The nodes by name.
    """

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.nodes = dict(nodes)

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
