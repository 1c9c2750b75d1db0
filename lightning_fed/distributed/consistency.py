"""Checks that all processes of a run agree after each round."""

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
    "Standing", "checksum", "expect_same_data", "expect_same_standing", "follow_first", "plain_options",
    "share_model", "state_of_first",
]  # fmt: skip

_T = TypeVar("_T")
_LEAST_SIDE = 32  # for tensors below 8 KiB the sums would save little


class Standing(NamedTuple):
    """The state of one process after a round.

    Attributes:
        signum: The signal that asked it to stop, None for none.
        should_stop: Whether a callback asked it to stop.
        held: A checksum of the global model and the options of the local optimizer.
        kept: A checksum of the server state of methods.
    """

    signum: int | None
    should_stop: bool
    held: int
    kept: int


def checksum(*values: Any) -> int:
    """Computes a checksum of nested values: bits of tensors, and plain values; other objects are left out."""
    tensors: list[Tensor] = []

    def take(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        tensors.append(value.detach())
        return str(value.dtype), *value.shape

    text = json.dumps(values, skipkeys=True, default=take)  # `take` collects the tensors
    return crc32(text.encode() + _sums(tensors))


def _sums(tensors: list[Tensor]) -> bytes:
    """Returns the bits of small tensors and checksums of large ones, with one wait for the accelerator.

    The int64 words of a tensor form a square, and its rows and columns are added up mod 2**64. A single changed word
    changes two sums. A change stays hidden only if the differences cancel in every row and every column. This needs at
    least the four corners of a rectangle, which rounding and noise do not hit.
    """
    parts: list[Tensor] = []
    for tensor in tensors:
        flat = tensor.contiguous().flatten().view(torch.uint8)
        if (side := isqrt(len(flat) // 8)) > _LEAST_SIDE:
            words, flat = flat[: 8 * side**2], flat[8 * side**2 :]
            words = words.clone() if words.storage_offset() % 8 else words  # an int64 starts at a multiple of 8 bytes
            square = words.view(torch.int64).view(side, side)
            parts += [square.sum(0).view(torch.uint8), square.sum(1).view(torch.uint8)]
        parts.append(flat)
    home = next((part.device for part in parts if part.device.type != "cpu"), torch.device("cpu"))
    return torch.cat([part.to(home) for part in parts]).cpu().numpy().tobytes() if parts else b""


def plain_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns the hyper-parameters of all parameter groups, sorted by name."""
    return [{name: group[name] for name in sorted(group) if name != "params"} for group in optimizer.param_groups]


@torch.no_grad()
def follow_first(processes: Processes, tensors: Sequence[Tensor], what: str) -> None:
    """Replaces tensors in place by those of the first process where any bit differs.

    Processors with other vector instructions round differently, so the same inputs may give other bits.
    """
    if processes.size > 1 and len(set(processes.exchange(checksum(*tensors), what))) > 1:
        processes.broadcast(*tensors)


def state_of_first(processes: Processes, state: _T) -> _T:
    """Returns the state of the first process on every process, with tensors on the CPU; all processes must call it."""
    own = pickle.dumps(move_data_to_device(state, "cpu") if processes.rank == 0 else None, protocol=5)
    content = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    length = processes.exchange(len(content), "state")[0]
    whole = content if processes.rank == 0 else content.new_empty(length)
    processes.broadcast(whole)
    first: _T = pickle.loads(whole.numpy().data)
    return first


def expect_same_standing(everyone: list[Standing], round: int) -> None:
    """Refuses processes that differ in the global model or in the options of the local optimizer."""
    if len({standing.held for standing in everyone}) > 1:
        raise FederatedError(
            "Expected all processes to hold the same global model, and the same options of the local optimizer, after "
            f"round {round}, but they differ: a callback or schedule must change them alike on each, without drawing "
            "from a stream of its own; or set `--trainer.devices 1`."
        )


def expect_same_data(processes: Processes, seed: int, sizes: Any, split_hash: str | None) -> None:
    """Refuses processes whose clients differ."""
    facts = (seed, np.asarray(sizes).tobytes(), split_hash)
    if len(set(processes.exchange(facts, "data"))) > 1:
        raise FederatedError(
            "Expected every process to make the same clients of the same data, but the splits differ: each process "
            "runs the whole script, so seed what it draws (`--seed_everything`, `seed_everything` at its top), or set "
            "`--trainer.devices 1`."
        )


@torch.no_grad()
def share_model(processes: Processes, module: LightningModule) -> None:
    """Copies the parameters and buffers of the first process's module to all processes."""
    if processes.size > 1:
        tensors = [*module.parameters(), *module.buffers()]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if any(other != shapes for other in processes.exchange(shapes, "model")):
            raise FederatedError(
                "Expected every process to build the same model, but their parameters differ in shape: `--model` must "
                "not depend on the rank; or set `--trainer.devices 1`."
            )
        processes.broadcast(*tensors)
