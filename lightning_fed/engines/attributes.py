"""A snapshot of what a module and the user's code around it hold, to be compared with later values and restored."""

import pickle
import random
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache, partial
from operator import is_
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

__all__ = ["Attributes", "is_wrapped", "of_torch", "parts_of"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
# Longer lists and dicts, and larger arrays, count as data and are not copied where contents are followed.
_MOST_ENTRIES, _MOST_BYTES = 10_000, 1 << 16
_NOTHING: Any = object()
_RANDOM = (torch.Generator, np.random.RandomState, random.Random, np.random.Generator)


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
def _may_hold(kind: type) -> bool:
    """Returns whether objects of a class have a content that is noted."""
    return issubclass(kind, (list, dict, set, tuple, np.ndarray, *_RANDOM))


class Attributes:
    """The attributes of a module and of its parts as they are now, to be compared with later ones and put back.

    ``put_back`` restores each attribute's object, the entries of lists, dicts and sets, the states of random generators
    and the ``requires_grad`` of parameters. The contents of other objects are not followed.

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
        todo = [
            (owner, key, value)
            for owner, _, _, held in self._held
            for key, value in held.items()
            if _may_hold(type(value)) or type(value) in kinds  # type: ignore[arg-type]  # classes are hashable
        ]
        seen: set[int] = set()
        for owner, key, value in todo:  # grows meanwhile
            if id(value) in seen:
                continue
            seen.add(id(value))
            inner: Collection[Any] = value if isinstance(value, (list, tuple)) else ()
            if (content := _content(value, places is not None)) is not None:
                self._contents.append((owner, key, value, *content))
                inner = value.values() if isinstance(value, dict) and key != "_buffers" else inner
            elif type(value) in kinds and hasattr(value, "__dict__"):
                self._held.append((owner, key, value, _attributes(value)))
                inner = vars(value).values()
            if places is not None and len(inner) <= _MOST_ENTRIES:
                todo += [(owner, key, part) for part in inner]

    def changes(self, may_grow: bool = False) -> Iterator[tuple[Any, str]]:
        """Yields holder and name of each changed value; with ``may_grow``, not of lists and dicts that only grew."""
        for owner, name, holder, before in self._held:
            now = _attributes(holder)
            for key in dict.fromkeys((*before, *now)):
                one, other = before.get(key, _NOTHING), now.get(key, _NOTHING)
                if not (_same(one, other) or (may_grow and _has_grown(one, other))):
                    yield owner, name or key
        for owner, name, value, content, _ in self._contents:
            if not (_equal(value, content) or (may_grow and _has_grown(content, value))):
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
        for _, _, _, content, put_back in self._contents:
            put_back(content)
        for parameter, requires_grad in self._trained:
            parameter.requires_grad = requires_grad


def _attributes(owner: Any) -> dict[str, Any]:
    held = dict(vars(owner))
    return held if isinstance(owner, nn.Module) else {name: v for name, v in held.items() if not name.startswith("__")}


def _content(value: Any, follows: bool) -> tuple[Any, Callable[[Any], Any]] | None:
    """Returns a value's content and the function that restores it; None if it has none or is not followed."""
    if isinstance(value, (list, dict, set)) and not (follows and len(value) > _MOST_ENTRIES):
        return value.copy(), partial(_refill, value)
    if isinstance(value, torch.Generator):  # by its bytes, which can be compared
        return value.get_state().numpy(), lambda state: value.set_state(torch.from_numpy(state))
    if isinstance(value, np.random.RandomState):
        return value.get_state(), value.set_state
    if isinstance(value, random.Random):
        return value.getstate(), value.setstate
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state, partial(setattr, value.bit_generator, "state")
    if follows and isinstance(value, np.ndarray) and value.nbytes <= _MOST_BYTES:
        return value.copy(), partial(np.copyto, value)
    return None


def _refill(container: Any, content: Any) -> None:
    if not (container or content):
        return
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(content)


def _same(one: Any, other: Any) -> bool:
    """Says whether a value is the same object, or the same number or text, NaN too."""
    return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and repr(one) == repr(other))


def _has_grown(one: Any, other: Any) -> bool:
    return isinstance(one, (list, dict)) and type(one) is type(other) and len(other) > len(one)


def _equal(value: Any, content: Any) -> bool:
    """Returns whether a value still has its former content."""
    if isinstance(value, set):
        return bool(value == content)
    if isinstance(value, dict):
        value, content = ([*held, *held.values()] for held in (value, content))
    if isinstance(value, list):
        return len(value) == len(content) and any(all(map(same, value, content)) for same in (is_, _same))
    now = _content(value, follows=True)
    return now is not None and pickle.dumps(now[0]) == pickle.dumps(content)
