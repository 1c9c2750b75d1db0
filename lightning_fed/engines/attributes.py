"""What a module's parts hold in their attributes, compared by value."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from io import BytesIO
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Place", "Snapshot", "is_wrapped"]

# An attribute: the name of its part, and its own. A global variable is of the part "global".
Place = tuple[str, str]

# What many methods write, and what Lightning lends to a module.
_LEFT_OUT = frozenset({"_buffers", "log", "_trainer", "_fabric", "_fabric_optimizers"})
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_BY_IDENTITY = (type, FunctionType, BuiltinFunctionType, ModuleType)
# Larger values are compared by identity: a data set that a module holds is not written out.
_MOST_BYTES = 1 << 24


def is_wrapped(value: Any) -> bool:
    """Says whether a value is a tensor of a ``torch.func`` transform, which may be over."""
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


class Snapshot:
    """The attributes of a module's parts, each as something that can be compared.

    Attributes are compared by value, those within containers and objects too, as ``pickle`` writes them. Compared by
    identity are tensors, parts of the module, classes, functions, and what is too large; a tensor that was written to
    counts as another one.

    Args:
        module: The module.
        variables: Global variables to compare as well, each name with the dict that holds it.
    """

    def __init__(self, module: nn.Module, variables: Mapping[str, dict[str, Any]] | None = None) -> None:
        self._kept: list[Any] = []  # so that no id is given away meanwhile
        named = dict(module.named_modules())
        self.parts = {id(part) for part in named.values()}
        self._values: dict[Place, Any] = {}
        for name, part in named.items():
            for key, value in vars(part).items():
                if key not in _LEFT_OUT:
                    self._values[name, key] = self._value(value)
        for key, held in (variables or {}).items():
            self._values["global", key] = self._value(held[key])

    def differences(self, other: Snapshot) -> set[Place]:
        """Returns the attributes that differ, or that only one of the two has."""
        ours, theirs = self._values, other._values
        return {place for place in ours.keys() | theirs.keys() if ours.get(place) != theirs.get(place)}

    def _value(self, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return type(value), repr(value)  # NaN equals itself
        file = _Bounded()
        try:
            _Writer(file, self).dump(value)
        except Exception:  # noqa: BLE001  # whatever an object raises that cannot be pickled
            return self.identity(value)
        return file.getvalue()

    def identity(self, value: Any) -> int:
        """Returns a number that no other object has as long as this snapshot is there."""
        self._kept.append(value)
        return id(value)


class _Bounded(BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > _MOST_BYTES:
            raise OverflowError
        return super().write(data)


class _Writer(pickle.Pickler):
    """Writes a value for comparison alone: nobody reads it back."""

    def __init__(self, file: BytesIO, snapshot: Snapshot) -> None:
        super().__init__(file, protocol=4)
        self._snapshot = snapshot

    def persistent_id(self, value: Any) -> Any:
        """Tells what is compared by identity, and what of its value counts too."""
        snapshot = self._snapshot
        if isinstance(value, Tensor):
            return snapshot.identity(value), *_state(value)
        if isinstance(value, torch.Generator):
            return snapshot.identity(value), value.get_state().numpy().tobytes()
        if id(value) in snapshot.parts or isinstance(value, _BY_IDENTITY):
            return snapshot.identity(value)
        return None

    def reducer_override(self, value: Any) -> Any:
        """Lets an object that cannot be pickled, such as a lock, stand for itself and its attributes."""
        try:
            value.__reduce_ex__(4)
        except Exception:  # noqa: BLE001  # whatever it raises
            return type(value), (self._snapshot.identity(value),), getattr(value, "__dict__", None)
        return NotImplemented


def _state(value: Tensor) -> tuple[Any, ...]:
    """Says whether a tensor requires a gradient, and, unless it is a parameter, how often it was written to."""
    if is_wrapped(value) or isinstance(value, nn.Parameter):
        return ()
    return value.requires_grad, 0 if value.is_inference() else value._version
