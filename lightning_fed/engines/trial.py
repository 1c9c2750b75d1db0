"""What a module and the user's code around it hold: compared after a trial, and put back."""

import pickle
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from operator import is_
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_fed.core.devices import device_streams, wide_dtype
from lightning_fed.core.seeding import isolated_streams

__all__ = ["Attributes", "agree", "holds_stacked_tensors", "of_torch", "random_states", "without_trace"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
# Longer lists and dicts, and larger arrays, count as data and are not copied where contents are followed.
_MOST_ENTRIES, _MOST_BYTES = 10_000, 1 << 16
_NOTHING: Any = object()
_RANDOM = (torch.Generator, np.random.RandomState, random.Random, np.random.Generator)
_CONTAINERS = (OrderedDict, dict, list, set, tuple)


def is_wrapped(value: Any) -> bool:
    """Returns whether a value is a tensor made inside a ``torch.func`` transform, which may have ended."""
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def of_torch(part: Any) -> bool:
    """Returns whether a part of a module is of a class of torch's own."""
    return type(part).__module__.startswith("torch.")


def parts_of(module: nn.Module) -> list[nn.Module]:
    """Returns what ``modules()`` yields, without hashing the parts: torchmetrics' hash reads their states."""
    found: dict[int, nn.Module] = {}
    todo = [module]
    while todo:
        if id(part := todo.pop()) not in found:
            found[id(part)] = part
            todo += [child for child in reversed(part._modules.values()) if child is not None]
    return [*found.values()]


@lru_cache(maxsize=4096)
def _base_of(kind: type) -> Any:
    """Returns the class, of those whose content is noted, that a class derives from; None if there is none."""
    return next((base for base in (*_CONTAINERS, np.ndarray, *_RANDOM) if issubclass(kind, base)), None)


def _base(value: Any) -> Any:
    return _base_of(type(value))  # type: ignore[arg-type]  # classes are hashable


def _entries(container: Any) -> Any:
    """Copies the entries as a list, dict or set, by methods of the base class: its own class may override any."""
    base = _base(container)
    if base is set:
        return set(container)
    return dict(base.items(container)) if issubclass(base, dict) else list(base.__iter__(container))


class Attributes:
    """The attributes of a module and of its parts as they are now, to be compared with later ones and put back.

    ``put_back`` restores each attribute's object, the entries of lists, dicts and sets, also of those in them, the
    states of random generators and the ``requires_grad`` of parameters. The contents of other objects are not followed.

    Args:
        module: The module.
        places: See ``own_places``: their variables are included, and then the contents of lists, dicts, small arrays
            and objects of these classes too. None for the module alone.
        quick: Whether torch's own parts of the module are left out: a training step changes none of their attributes.
    """

    def __init__(self, module: nn.Module, places: Collection[Any] | None = None, quick: bool = False) -> None:
        kinds = {p for p in places or () if isinstance(p, type) and not issubclass(p, (nn.Module, Callback))}
        self.parts = parts_of(module)
        parameters = (p for part in self.parts for p in part._parameters.values() if p is not None)
        self._trained = [(p, p.requires_grad) for p in parameters]
        owners = (*(part for part in self.parts if not (quick and of_torch(part))), *(places or ()))
        self._held = [(owner, "", owner, _attributes(owner)) for owner in owners]
        self._contents: list[tuple[Any, str, Any, Any, Callable[[Any], Any]]] = []
        self._nested = list[tuple[Any, Callable[[Any], Any]]]()
        todo = [
            (owner, key, value)
            for owner, _, _, held in self._held
            for key, value in held.items()
            if _base(value) is not None or type(value) in kinds
        ]
        seen, follows = set[int](), places is not None
        for owner, key, value in todo:  # grows meanwhile
            if id(value) in seen:
                continue
            seen.add(id(value))
            base, inner = _base(value), list[Any]()
            if (content := _content(value, follows)) is not None:
                self._contents.append((owner, key, value, *content))
                inner = [*content[0].values()] if base in (dict, OrderedDict) and key != "_buffers" else inner
                inner = content[0] if base is list else inner
            if follows and base is tuple:
                inner = _entries(value)
            if (type(value) in kinds or base in _CONTAINERS) and type(value) is not base and hasattr(value, "__dict__"):
                self._held.append((owner, key, value, _attributes(value)))
                inner += vars(value).values()
            if follows and len(inner) <= _MOST_ENTRIES:
                todo += [(owner, key, part) for part in inner]
            elif len(inner) <= _MOST_ENTRIES:  # a metric collection's groups, for one
                found = (_content(part, follows) for part in inner if _base(part) in _CONTAINERS)
                self._nested += [content for content in found if content is not None]

    def changes(self, may_grow: bool = False) -> Iterator[tuple[Any, str]]:
        """Yields holder and name of each changed value; with ``may_grow``, not of lists and dicts that only grew."""
        for owner, name, holder, before in self._held:
            now = _attributes(holder)
            for key in dict.fromkeys((*before, *now)):
                one, other = before.get(key, _NOTHING), now.get(key, _NOTHING)
                if not (_same(one, other) or (may_grow and _has_grown(one, other))):
                    yield owner, name or key
        for owner, name, value, content, _ in self._contents:
            now = _entries(value) if _base(value) in _CONTAINERS else value
            if not (_equal(now, content) or (may_grow and _has_grown(content, now))):
                yield owner, name

    def shared(self) -> str | None:
        """Names a changed attribute that clients trained at once would share, except in torch's layers; else None."""
        return next((name for owner, name in self.changes() if not of_torch(owner)), None)

    def put_back(self) -> None:
        """Restores the values."""
        for _, _, holder, before in self._held:
            now, kind = _attributes(holder), type if isinstance(holder, type) else object
            if now.keys() == before.keys() and all(map(is_, now.values(), map(before.__getitem__, now))):
                continue
            for key in now.keys() - before.keys():
                kind.__delattr__(holder, key)
            for key, value in before.items():
                if now.get(key, _NOTHING) is not value:
                    kind.__setattr__(holder, key, value)  # not `setattr`, which the holder may override
        for content, put_back in (*(each[3:] for each in self._contents), *self._nested):
            put_back(content)
        for parameter, requires_grad in self._trained:
            parameter.requires_grad = requires_grad


def _attributes(owner: Any) -> dict[str, Any]:
    if isinstance(owner, nn.Module):
        return dict(vars(owner))
    return {k: v for k, v in vars(owner).items() if isinstance(k, str) and not k.startswith("__")}


def _content(value: Any, follows: bool) -> tuple[Any, Callable[[Any], Any]] | None:
    """Returns a value's content and the function that restores it; None if it has none or is not followed."""
    base = _base(value)
    if base in _CONTAINERS:
        known = base is not tuple and not (follows and base.__len__(value) > _MOST_ENTRIES)
        return (_entries(value), partial(_refill, value)) if known else None
    if base is torch.Generator:  # by its bytes, which can be compared
        return value.get_state().numpy(), lambda state: value.set_state(torch.from_numpy(state))
    if base is np.random.RandomState:
        return value.get_state(), value.set_state
    if base is random.Random and not isinstance(value, random.SystemRandom):  # which has no state
        return value.getstate(), value.setstate
    if base is np.random.Generator:
        return value.bit_generator.state, partial(setattr, value.bit_generator, "state")
    if base is np.ndarray and follows and value.nbytes <= _MOST_BYTES and value.flags.writeable:
        return np.array(value), partial(np.copyto, value)
    return None


def _refill(container: Any, content: Any) -> None:
    """Gives a container its former entries, in their order, by methods of its base class."""
    if _identical(_entries(container), content):
        return
    base = _base(container)
    base.clear(container)
    if base in (list, set):
        (list.extend if base is list else set.update)(container, content)
    for key, value in content.items() if isinstance(content, dict) else ():
        base.__setitem__(container, key, value)


def _same(one: Any, other: Any) -> bool:
    """Says whether a value is the same object, or the same number or text, NaN too."""
    return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and repr(one) == repr(other))


def _has_grown(one: Any, other: Any) -> bool:
    base = _base(one)
    return base in (list, dict, OrderedDict) and type(one) is type(other) and base.__len__(other) > base.__len__(one)


def _equal(value: Any, content: Any) -> bool:
    """Returns whether a value, a container by its entries, still has its former content."""
    if isinstance(value, (dict, list, set)):
        return _identical(value, content) or _identical(value, content, _same)
    now = _content(value, follows=True)
    return now is not None and pickle.dumps(now[0]) == pickle.dumps(content)


def _identical(one: Any, other: Any, same: Callable[[Any, Any], bool] = is_) -> bool:
    """Says whether two lists, dicts or sets have the same entries, in the same order."""
    if isinstance(one, set):
        return bool(one == other)
    one, other = ([*held, *held.values()] if isinstance(held, dict) else held for held in (one, other))
    return len(one) == len(other) and all(map(same, one, other))


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
