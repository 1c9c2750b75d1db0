"""What all processes of a run must have in common after each round."""

import hashlib
import json
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.distributed.processes import Processes
from lightning_fed.errors import FederatedError

__all__ = ["Standing", "checksum", "expect_same_data", "expect_same_standing", "share_model"]


class Standing(NamedTuple):
    """How one process stands after a round.

    Attributes:
        signum: The signal that has asked it to stop, None for none.
        should_stop: Whether a callback has.
        held: A checksum of what it goes on with.
    """

    signum: int | None
    should_stop: bool
    held: int


def checksum(weights: Tensor, optimizer: Optimizer) -> int:
    """Computes a checksum of the global model and of all hyper-parameters that it is trained by; objects are left out.

    Args:
        weights: The global vector, shape (d,).
        optimizer: The local optimizer.
    """
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    plain = json.dumps(
        [float(weights.double().sum()), groups],
        sort_keys=True,
        default=lambda value: value.tolist() if isinstance(value, Tensor) else None,
    )
    return crc32(plain.encode())


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
    facts = (seed, hashlib.sha256(np.asarray(sizes).tobytes()).hexdigest(), split_hash)
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
