"""What must be said to an accelerator otherwise than to a CPU."""

import torch
from torch import Tensor

__all__ = ["to_device"]


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Sends a tensor of the host to a device without waiting for it: to a GPU from pinned memory."""
    if device.type == "cpu":
        return values
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)
