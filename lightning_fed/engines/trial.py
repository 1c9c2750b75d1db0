"""Lets a module take steps that leave no trace, and compares what they give."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_fed.core.devices import device_streams, wide_dtype
from lightning_fed.core.seeding import isolated_streams
from lightning_fed.core.user_code import is_own
from lightning_fed.engines.attributes import is_wrapped

__all__ = ["Attributes", "agree", "holds_stacked_tensors", "next_numbers", "random_states", "without_trace"]

_GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)


class Attributes:
    """The attributes of a module and of its parts as they are now, to be put back.

    They get their objects back, lists, dicts and sets their entries, random generators their states, parameters whether
    they require a gradient; what other objects hold is not followed.

    Args:
        module: The module.
        variables: Global variables that count as well, each name with the dict that holds it; then objects of the
            user's own classes among all that count with their attributes. None for neither.

    Attributes:
        values: All that they hold.
        containers: Lists, dicts and sets among it, each with what is in it.
    """

    def __init__(self, module: nn.Module, variables: Mapping[str, dict[str, Any]] | None = None) -> None:
        self._held = [(vars(part), dict(vars(part))) for part in module.modules()]
        self._variables = [(live, name, live[name]) for name, live in (variables or {}).items()]
        if variables is not None:
            values = [v for _, before in self._held for v in before.values()] + [v for *_, v in self._variables]
            objects = {id(v): v for v in values if is_own(type(v)) and not isinstance(v, (type, nn.Module))}
            self._held += [(vars(v), dict(vars(v))) for v in objects.values() if hasattr(v, "__dict__")]
        self._trained = [(p, p.requires_grad) for p in module.parameters()]
        self.values = [v for _, before in self._held for v in before.values()] + [v for *_, v in self._variables]
        self.containers = [(value, value.copy()) for value in self.values if isinstance(value, (list, dict, set))]
        self._streams = [_stream(value) for value in self.values if isinstance(value, _GENERATORS)]

    def put_back(self) -> None:
        """Makes them what they were."""
        for live, before in self._held:
            live.clear()
            live.update(before)
        for live, name, value in self._variables:
            live[name] = value
        for container, content in self.containers:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)
        for parameter, requires_grad in self._trained:
            parameter.requires_grad = requires_grad
        for put_back, state in self._streams:
            put_back(state)


def _stream(generator: Any) -> tuple[Callable[[Any], Any], Any]:
    """Returns what puts the state of a random generator back, and its state now."""
    if isinstance(generator, torch.Generator):
        return generator.set_state, generator.get_state()
    if isinstance(generator, random.Random):
        return generator.setstate, generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.set_state, generator.get_state()
    bits = generator.bit_generator
    return partial(setattr, bits, "state"), bits.state


@contextmanager
def without_trace(
    module: nn.Module, frozen: Iterable[Tensor] = (), variables: Mapping[str, dict[str, Any]] | None = None
) -> Iterator[None]:
    """Puts the attributes of a module and of its parts back at the end of the block, and the global random streams.

    Args:
        module: The module.
        frozen: Parameters of it that training moves: they get their values back as well.
        variables: See ``Attributes``.

    Attributes are put back as ``Attributes`` says, and tensors that are no parameters get their values back.
    """
    kept = Attributes(module, variables)
    buffers = [buffer for part in module.modules() for buffer in part._buffers.values() if buffer is not None]
    loose = [value for value in kept.values if isinstance(value, Tensor)]
    loose += [
        part for value, _ in kept.containers if isinstance(value, list) for part in value if isinstance(part, Tensor)
    ]
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
    """Says whether a tensor is no parameter, nor one that nobody can write to: expanded, or of a transform's past."""
    if isinstance(tensor, nn.Parameter) or is_wrapped(tensor):  # as LSTM keeps them until its next step
        return False
    return not any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def agree(one: Tensor, other: Tensor, coarse: float) -> bool:
    """Says whether a tensor is another one up to a relative error, where that one is finite."""
    if not other.is_floating_point():
        return torch.equal(one, other)
    finite = other.isfinite()
    one, other = (tensor[finite].to(wide_dtype(tensor.device)) for tensor in (one, other))
    return bool((one - other).norm() <= coarse * other.norm() + 1e-6)


def holds_stacked_tensors(module: nn.Module) -> str | None:
    """Names an attribute that holds tensors of a ``torch.func`` transform that is over, None if there is none."""
    own = [part for part in module.modules() if not type(part).__module__.startswith("torch.")]  # torch knows its own
    for part in own:
        for name, value in vars(part).items():
            held = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else [value]
            if any(map(is_wrapped, held)):
                return name
    return None


def random_states(device: torch.device) -> tuple[bytes, bytes, bytes, bytes]:
    """Returns the state of the global random streams: torch's, NumPy's, Python's, those of a run's device.

    A run on the CPU has no other: what of a GPU has been started meanwhile, by whatever looked at it, says nothing.
    """
    numpy_state: Any = np.random.get_state()  # noqa: NPY002  # the global stream is what is asked for
    return (
        torch.default_generator.get_state().numpy().tobytes(),
        numpy_state[1].tobytes() + bytes(str(numpy_state[2:]), "ascii"),
        bytes(str(random.getstate()), "ascii"),
        _device_states(device),
    )


def next_numbers(device: torch.device) -> tuple[bytes, bytes, bytes, bytes]:
    """Returns the same of torch and the device, but of NumPy and Python a number, which is quicker and moves them."""
    drawn = np.random.bytes(8), random.randbytes(8)  # noqa: NPY002  # as above
    return torch.default_generator.get_state().numpy().tobytes(), *drawn, _device_states(device)


def _device_states(device: torch.device) -> bytes:
    return b"".join(state.numpy().tobytes() for state in (device_streams() if device.type != "cpu" else []))
