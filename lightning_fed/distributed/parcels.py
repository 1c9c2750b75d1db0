"""What clients keep as bytes, on its way from one process to another."""

from __future__ import annotations

import pickle
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from lightning_fed.errors import FederatedError

__all__ = ["pack", "room_for", "unpack"]


def pack(content: Any, target: int) -> Tensor:
    """Makes bytes of what clients keep, before any process waits for them.

    Args:
        content: Lists and dicts of tensors on the CPU.
        target: The process that needs it, for messages.

    Returns:
        The bytes, shape (n,), uint8.

    Raises:
        FederatedError: If something cannot be pickled, or there is no room for the bytes.
    """
    written = BytesIO()
    try:
        pickle.dump(content, written, protocol=5)
    except Exception as error:  # whatever pickle raises, or what it meets
        raise FederatedError(
            f"Expected what clients keep to be sent to process {target}, which trains them now, but it cannot be "
            f"packed ({type(error).__name__}: {' '.join(str(error).split())}): let them keep plain tensors, make room "
            "in memory, or set `--trainer.devices 1`."
        ) from error
    return torch.frombuffer(written.getbuffer(), dtype=torch.uint8)


def room_for(size: int) -> Tensor:
    """Returns an empty tensor for so many bytes.

    Raises:
        FederatedError: If there is no memory for them.
    """
    try:
        return torch.empty(size, dtype=torch.uint8)
    except (RuntimeError, MemoryError) as error:  # torch raises the former
        raise FederatedError(
            f"Expected room for {size} bytes that clients keep and that come from another process, but there is none: "
            "make room in memory, draw fewer clients (`--trainer.clients_per_round`), or set `--trainer.devices 1`."
        ) from error


def unpack(packed: Tensor) -> Any:
    """Returns what ``pack`` was given."""
    return pickle.loads(packed.numpy().data)
