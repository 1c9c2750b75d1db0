"""What all processes of a run must have in common after each round."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.distributed.processes import Processes
from lightning_fed.errors import FederatedError

__all__ = ["Standing", "expect_same_data", "expect_same_standing", "option_sums", "share_model"]


class Standing(NamedTuple):
    """How one process stands after a round.

    Attributes:
        signum: The signal that has asked it to stop, None for none.
        should_stop: Whether a callback has.
        model: A checksum of its global model.
        options: One for each hyper-parameter of its local optimizer, by name.
    """

    signum: int | None
    should_stop: bool
    model: str
    options: dict[str, int]


def option_sums(optimizer: Optimizer) -> dict[str, int]:
    """Computes a checksum of each hyper-parameter over all parameter groups; objects are left out."""
    values: dict[str, list[Any]] = {}
    for group in optimizer.param_groups:
        for name, value in group.items():
            plain = value.tolist() if isinstance(value, Tensor) else value
            if name != "params" and _is_plain(plain):
                values.setdefault(name, []).append(plain)
    return {name: crc32(repr(found).encode()) for name, found in values.items()}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def expect_same_standing(everyone: list[Standing], round: int) -> None:
    """Checks that all processes would train the same model in the same way.

    Raises:
        FederatedError: If one holds another model, or trains it otherwise.
    """
    ending = (
        "a callback or schedule must change it alike on each, without drawing from a stream of its own; or set "
        "`--trainer.devices 1`."
    )
    if len({standing.model for standing in everyone}) > 1:
        raise FederatedError(
            f"Expected all processes to hold the same global model after round {round}, but they differ: {ending}"
        )
    options = [standing.options for standing in everyone]
    for name in sorted(set().union(*options)):
        if len({of_one.get(name) for of_one in options}) > 1:
            raise FederatedError(
                f"Expected all processes to train by the same `{name}` of the local optimizer after round {round}, but "
                f"they differ: {ending}"
            )


def expect_same_data(processes: Processes, seed: int, sizes: Any, split_hash: str | None) -> None:
    """Checks that all processes have made the same clients.

    Raises:
        FederatedError: If they have not.
    """
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
