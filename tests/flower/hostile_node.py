"""A worker as `lightning-fed flower node` is, which lies in some rounds."""

import sys

import torch

from lightning_fed.cli.flower.command import main
from lightning_fed.engines.fleet.packets import pack, unpack
from lightning_fed.trainer.fleet import Node

_answer, _replies = Node.answer, dict[int, bytes]()


def lie(node: Node, packet: bytes) -> bytes:
    """Returns what an honest node would, but for rounds 2 to 5."""
    asked, reply = unpack(packet)[0], _answer(node, packet)
    if asked["kind"] != "train":
        return reply
    _replies[asked["round"]] = reply
    facts, tensors = unpack(reply)
    name = next(name for name in tensors if name.endswith(".delta"))
    if asked["round"] == 2:
        return pack(facts, tensors | {name: torch.full_like(tensors[name], torch.nan)})
    if asked["round"] == 3:
        return pack(facts, tensors | {name: tensors[name][:-1]})
    if asked["round"] == 4:
        return pack(facts, tensors | {"more": torch.zeros(1 << 26, dtype=torch.uint8)})
    return _replies[1] if asked["round"] == 5 else reply


if __name__ == "__main__":
    Node.answer = lie  # type: ignore[method-assign]
    main(sys.argv[1:])
