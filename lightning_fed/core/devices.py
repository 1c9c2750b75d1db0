"""What must be said to an accelerator otherwise than to a CPU."""

import torch
from torch import Tensor

__all__ = ["copy_into", "to_device"]


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Sends a tensor of the host to a device, to a GPU from pinned memory and without waiting for it."""
    if device.type == "cpu":
        return values
    # Elsewhere what is sent may be freed before it has arrived.
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def copy_into(out: Tensor, values: Tensor) -> None:
    """Copies a tensor into another one; what goes from the host to a GPU is pinned, and nobody waits for it."""
    is_sent = out.device.type == "cuda" and values.device.type == "cpu"
    out.copy_(values.pin_memory() if is_sent else values, non_blocking=is_sent)
