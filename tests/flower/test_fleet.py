"""What Flower hands over is believed no more than what it brings: without its processes."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from lightning_fed.trainer.fleet.flower import FlowerFleet


def packet(data: bytes) -> RecordDict:
    return RecordDict({"packet": ArrayRecord({"": Array("uint8", (len(data),), "bytes", data)})})


@pytest.fixture(autouse=True)
def _of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a ServerApp, where messages know who sends them."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Grid:
    """Nodes that reply as they are told, at once."""

    def __init__(self, *nodes: Callable[[Message], Message | None]) -> None:
        self.nodes, self.there, self.replies = nodes, len(nodes), dict[str, Message]()

    def get_node_ids(self) -> Iterable[int]:
        self.there += 1
        return range(1, min(self.there, len(self.nodes) + 1))

    def push_messages(self, messages: Sequence[Message]) -> list[str]:
        (message,) = messages
        name = message.metadata.__dict__["_message_id"] = f"message {len(self.replies)}"
        if (reply := self.nodes[message.metadata.dst_node_id - 1](message)) is not None:
            self.replies[name] = reply
        return [name]

    def pull_messages(self, names: list[str]) -> list[Message]:
        return [self.replies[name] for name in names if name in self.replies]


def echo(message: Message) -> Message:
    return Message(packet(message.content["packet"][""].data + b"!"), reply_to=message)


def test_each_node_gets_its_packet_and_what_is_none_is_named() -> None:
    others: list[Any] = [
        lambda message: Message(Error(1, "it has failed"), reply_to=message),
        lambda message: Message(RecordDict({"other": ArrayRecord()}), reply_to=message),
        lambda message: None,
    ]
    fleet = FlowerFleet(Grid(echo, *others), deadline=1.0)
    replies = fleet.ask({"1": b"one", "2": b"two", "3": b"three", "4": b"four"})
    assert replies.keys() == {"1", "2", "3"}  # the fourth has not replied when time is up
    assert replies["1"] == b"one!"
    assert replies["2"] == "it has failed"
    assert "sent no packet" in str(replies["3"])


def test_a_run_waits_for_its_nodes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    grid = Grid(echo, echo)
    grid.there = 0
    fleet = FlowerFleet(grid, nodes=2)
    assert fleet.hello() == {"1": b"!", "2": b"!"}
    grid.there = 0
    assert fleet.hello() == {}
