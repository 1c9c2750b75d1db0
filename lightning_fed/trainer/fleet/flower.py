"""A fleet whose packets Flower brings: SuperNodes are its nodes."""

import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_fed.errors import expect_count, expect_number

__all__ = ["FlowerFleet"]

_LONGEST_HELLO = 30.0  # a node that is there answers it at its next look for messages, which is every 3 s


class FlowerFleet:
    """Asks nodes by the Message API of Flower, in a ServerApp. A node has the name of its SuperNode's id.

    Args:
        grid: What Flower hands to the ServerApp.
        nodes: How many nodes the run waits for before it begins; later ones may be fewer.
        deadline: Seconds after which a node that has not replied is left out of the round.
        evaluates: Where the model is evaluated: ``server``, ``nodes`` or ``both``.
    """

    def __init__(self, grid: Any, nodes: int = 1, deadline: float = 600.0, evaluates: str = "server") -> None:
        self._grid, self._awaited = grid, expect_count("nodes", nodes)
        self._deadline, self.evaluates = expect_number("deadline", deadline, above=0), evaluates

    def hello(self) -> dict[str, bytes]:
        """Returns what each node says of itself; the first time, it waits until there are enough."""
        said, told, waits = dict[str, bytes](), dict[str, str](), self._awaited
        while True:
            asked = [str(node) for node in self._grid.get_node_ids() if str(node) not in said]
            for node, reply in self._send(dict.fromkeys(asked, b""), _LONGEST_HELLO).items():
                if isinstance(reply, bytes):
                    said[node] = reply
                elif told.get(node) != reply:
                    told[node] = reply
                    rank_zero_warn(f"Node {node} does not take part yet: {reply}")
            if len(said) >= self._awaited:
                self._awaited = 0
                return said
            if len(said) != waits:
                rank_zero_info(f"Waits for {self._awaited} nodes; {len(said)} of them are there.")
            waits = len(said)
            time.sleep(2.0)

    def ask(self, packets: Mapping[str, bytes]) -> dict[str, bytes | str]:
        """Returns the replies that are there once all are, or at the deadline."""
        return self._send(packets, self._deadline)

    def _send(self, packets: Mapping[str, bytes], seconds: float) -> dict[str, bytes | str]:
        from flwr.app import Array, ArrayRecord, Message, RecordDict

        waiting, replies = dict[str, str](), dict[str, bytes | str]()
        seconds = min(seconds, self._deadline)
        end = time.monotonic() + seconds
        for node, data in packets.items():  # one by one, as Flower holds all that it is given at once
            record = RecordDict({"packet": ArrayRecord({"": Array("uint8", (len(data),), "bytes", data)})})
            sent = self._grid.push_messages([Message(record, int(node), "train", ttl=seconds)])
            waiting |= {message: node for message in sent if message}
        while waiting and time.monotonic() < end:
            for reply in self._grid.pull_messages(list(waiting)):
                node = waiting.pop(reply.metadata.reply_to_message_id)
                try:
                    replies[node] = reply.error.reason if reply.has_error() else reply.content["packet"][""].data
                except Exception as error:  # of a node with another app
                    replies[node] = f"it has sent no packet ({error!r})"
            time.sleep(0.2)
        return replies
