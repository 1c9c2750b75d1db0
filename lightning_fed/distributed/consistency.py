"""What all processes of a run must have in common after each round."""

import json
import pickle
from collections.abc import Sequence
from math import isqrt
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.distributed.processes import Processes
from lightning_fed.errors import FederatedError

__all__ = [
    "Standing", "checksum", "expect_same_data", "expect_same_standing", "follow_first", "plain_options", "share_model",
    "state_of_first",
]  # fmt: skip

_T = TypeVar("_T")
_LEAST_SIDE = 32  # of less than 8 KiB the sums would not be much shorter


class Standing(NamedTuple):
    """How one process stands after a round.

    Attributes:
        signum: The signal that has asked it to stop, None for none.
        should_stop: Whether a callback has.
        held: A checksum of what it goes on with: the global model, and the options of the local optimizer.
        kept: A checksum of what methods keep on the server.
    """

    signum: int | None
    should_stop: bool
    held: int
    kept: int


def checksum(*values: Any) -> int:
    """Computes a checksum of nested values: tensors by their bits, and plain ones; objects are left out."""
    tensors: list[Tensor] = []

    def take(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        tensors.append(value.detach())
        return str(value.dtype), *value.shape

    text = json.dumps(values, skipkeys=True, default=take)  # which finds the tensors
    return crc32(text.encode() + _sums(tensors))


def _sums(tensors: list[Tensor]) -> bytes:
    """Returns the bits of small tensors, and sums of those of large ones; an accelerator is waited for once.

    A tensor's int64 words are laid out as a square, whose rows and columns are added up mod 2**64. One word that is
    another changes two sums. No sum changes only if differences cancel in each row and in each column: at four corners
    of a rectangle at least, which rounding and noise do not hit.
    """
    parts: list[Tensor] = []
    for tensor in tensors:
        flat = tensor.contiguous().flatten().view(torch.uint8)
        if (side := isqrt(len(flat) // 8)) > _LEAST_SIDE:
            words, flat = flat[: 8 * side**2], flat[8 * side**2 :]
            words = words.clone() if words.storage_offset() % 8 else words  # an int64 begins at a multiple of its size
            square = words.view(torch.int64).view(side, side)
            parts += [square.sum(0).view(torch.uint8), square.sum(1).view(torch.uint8)]
        parts.append(flat)
    home = next((part.device for part in parts if part.device.type != "cpu"), torch.device("cpu"))
    return torch.cat([part.to(home) for part in parts]).cpu().numpy().tobytes() if parts else b""


def plain_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns the hyper-parameters of all parameter groups, by name in order."""
    return [{name: group[name] for name in sorted(group) if name != "params"} for group in optimizer.param_groups]


@torch.no_grad()
def follow_first(processes: Processes, tensors: Sequence[Tensor], what: str) -> None:
    """Gives all processes the first one's tensors, in place, where theirs differ in a bit.

    What all compute from the same bits differs where processors round otherwise: with other vector instructions.
    """
    if processes.size > 1 and len(set(processes.exchange(checksum(*tensors), what))) > 1:
        processes.broadcast(*tensors)


def state_of_first(processes: Processes, state: _T) -> _T:
    """Returns on every process what the first one gives, its tensors on the CPU; called by all."""
    own = pickle.dumps(move_data_to_device(state, "cpu") if processes.rank == 0 else None, protocol=5)
    content = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    length = processes.exchange(len(content), "state")[0]
    whole = content if processes.rank == 0 else content.new_empty(length)
    processes.broadcast(whole)
    first: _T = pickle.loads(whole.numpy().data)
    return first


def expect_same_standing(everyone: list[Standing], round: int) -> None:
    """Refuses processes that hold another model than the others, or would train it otherwise."""
    if len({standing.held for standing in everyone}) > 1:
        raise FederatedError(
            "Expected all processes to hold the same global model, and the same options of the local optimizer, after "
            f"round {round}, but they differ: a callback or schedule must change them alike on each, without drawing "
            "from a stream of its own; or set `--trainer.devices 1`."
        )


def expect_same_data(processes: Processes, seed: int, sizes: Any, split_hash: str | None) -> None:
    """Refuses processes that have not made the same clients."""
    facts = (seed, np.asarray(sizes).tobytes(), split_hash)
    if len(set(processes.exchange(facts, "data"))) > 1:
        raise FederatedError(
            "Expected every process to make the same clients of the same data, but the splits differ: each process "
            "runs the whole script, so seed what it draws (`--seed_everything`, `seed_everything` at its top), or set "
            "`--trainer.devices 1`."
        )


@torch.no_grad()
def share_model(processes: Processes, module: LightningModule) -> None:
    """Gives all processes the parameters and buffers of the first one's module."""
    if processes.size > 1:
        tensors = [*module.parameters(), *module.buffers()]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if any(other != shapes for other in processes.exchange(shapes, "model")):
            raise FederatedError(
                "Expected every process to build the same model, but their parameters differ in shape: `--model` must "
                "not depend on the rank; or set `--trainer.devices 1`."
            )
        processes.broadcast(*tensors)
