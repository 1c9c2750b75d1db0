"""Lets a module take trial steps whose changes are undone, and compares their results."""

import random
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_fed.core.devices import device_streams, wide_dtype
from lightning_fed.core.seeding import isolated_streams
from lightning_fed.engines.attributes import Attributes, is_wrapped, of_torch

__all__ = ["agree", "holds_stacked_tensors", "random_states", "without_trace"]


@contextmanager
def without_trace(
    module: nn.Module, frozen: Iterable[Tensor] = (), places: Collection[Any] | None = None, quick: bool = False
) -> Iterator[None]:
    """Restores what ``Attributes`` covers, tensors that are not parameters, and the global random streams.

    Args:
        module: The module.
        frozen: Parameters of the module that training moves; their values are restored too.
        places: See ``Attributes``.
        quick: See ``Attributes``; buffers of torch's own parts are restored all the same.
    """
    kept = Attributes(module, places, quick)
    buffers = [buffer for part in kept.parts for buffer in part._buffers.values() if buffer is not None]
    held = [v for part in kept.parts if not (quick and of_torch(part)) for v in vars(part).values()]
    loose = [t for value in held for t in (value if isinstance(value, list) else [value]) if isinstance(t, Tensor)]
    tensors = [(t, t.detach().clone()) for t in (*buffers, *loose) if _may_change(t)]
    tensors += [(p, p.detach().clone()) for p in frozen]
    try:
        with isolated_streams():
            yield
    finally:
        kept.put_back()
        for tensor, value in tensors:
            tensor.detach().copy_(value)


def _may_change(tensor: Tensor) -> bool:
    """Returns whether a tensor can be written to: not a parameter, not expanded, not left over from a transform."""
    if isinstance(tensor, nn.Parameter) or is_wrapped(tensor):  # as LSTM keeps them until its next step
        return False
    return not any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def agree(one: Tensor, other: Tensor, coarse: float) -> bool:
    """Returns whether ``one`` is ``other`` up to the relative error ``coarse``, where ``other`` is finite."""
    if not other.is_floating_point():
        return torch.equal(one, other)
    finite = other.isfinite()
    one, other = (tensor[finite].to(wide_dtype(tensor.device)) for tensor in (one, other))
    return bool((one - other).norm() <= coarse * other.norm() + 1e-6)


def holds_stacked_tensors(module: nn.Module) -> str | None:
    """Names an attribute that holds tensors of an ended ``torch.func`` transform, None if there is none."""
    for part in module.modules():
        for name, value in () if of_torch(part) else vars(part).items():
            held = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else [value]
            if any(map(is_wrapped, held)):
                return name
    return None


def random_states(device: torch.device) -> tuple[Any, Any, Any, bytes]:
    """Returns the state of the global random streams: torch's, NumPy's, Python's, those of a run's device.

    A run on the CPU ignores the streams of a GPU, which other code may have started meanwhile.
    """
    numpy_state: Any = np.random.get_state()  # noqa: NPY002  # the global stream is what is asked for
    return (
        torch.default_generator.get_state().numpy().tobytes(),
        (numpy_state[1].tobytes(), *numpy_state[2:]),
        random.getstate(),
        b"".join(state.numpy().tobytes() for state in (device_streams() if device.type != "cpu" else ())),
    )
