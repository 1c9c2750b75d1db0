"""What a traced training step takes for constant: the attributes of the module's parts."""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from io import BytesIO
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_fed.engines.vectorized.step import CannotTrace

__all__ = ["Constants", "Place", "Refusing"]

# An attribute: the name of its part, and its own.
Place = tuple[str, str]

# Inputs of the graph, and what Lightning lends to a module.
_LEFT_OUT = frozenset({"_buffers", "log", "_trainer", "_fabric", "_fabric_optimizers"})
# Without these a module is none.
_OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_READ_ROUND = "its training reads the trainer, which is not the same in every round"


class Refusing:
    """Stands in for what a graph cannot follow: it can be handed on, and not be looked at.

    Args:
        reason: Why not.

    Attributes:
        asked: Whether somebody looked nevertheless, also where the module catches every exception.
    """

    def __init__(self, reason: str) -> None:
        self.reason, self.asked = reason, False


def _refuse(refusing: Any, *_: Any) -> Any:
    vars(refusing)["asked"] = True
    raise CannotTrace(vars(refusing)["reason"])


_BY_IDENTITY = (type, FunctionType, BuiltinFunctionType, ModuleType, Refusing)

for _name in (
    "bool", "eq", "ne", "lt", "le", "gt", "ge", "hash", "int", "index", "float", "str", "repr", "format", "neg", "add",
    "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow",
    "call", "len", "iter", "contains", "getitem", "setitem", "getattr", "enter", "abs",
):  # fmt: skip
    setattr(Refusing, f"__{_name}__", _refuse)


class Constants:
    """Notices which attributes of a module's parts have changed since it was last asked.

    A graph repeats operations, not Python: a temperature that a callback lowers from round to round would stay what it
    was. Attributes are compared by value, those within containers and objects too, as ``pickle`` writes them, but
    tensors of several elements, parts of the module, classes and functions by identity. Global variables, what
    functions close over, and attributes of classes are not followed.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._held = _Snapshot(module)

    @property
    def tensors(self) -> set[int]:
        """The ids of the tensors that attributes held when they were last compared."""
        return self._held.tensors

    def changed(self) -> set[Place]:
        """Returns the attributes that are others than they were."""
        before, self._held = self._held, _Snapshot(self._module)
        return self._held.differences(before)

    @contextmanager
    def tracing(self, shadowed: set[Place]) -> Iterator[None]:
        """Refuses a step, which is traced within the block, that reads what is not constant.

        Args:
            shadowed: Attributes that must not be read either; they are left shadowed.

        Raises:
            CannotTrace: If the trainer is read, if an attribute is changed, or if a part keeps its attributes where
                nobody sees them read.
        """
        parts = dict(self._module.named_modules())
        shadows = [Refusing(_READ_ROUND)]
        for name, part in parts.items():
            if isinstance(part, torch.jit.ScriptModule):
                raise CannotTrace(f"its part `{name}` is a ScriptModule, whose attributes torch reads out of sight")
            if "_trainer" in vars(part):
                part.__dict__["_trainer"] = shadows[0]
        for owner, name in shadowed:
            shadows.append(Refusing(f"its training reads `{name}`"))
            parts[owner].__dict__[name] = shadows[-1]
        before = _Snapshot(self._module)
        yield
        for shadow in shadows:
            if vars(shadow)["asked"]:
                raise CannotTrace(vars(shadow)["reason"])
        if changed := _Snapshot(self._module).differences(before):
            raise CannotTrace(f"its training changes its attribute `{min(changed)[1]}`")

    def can_be_shadowed(self, places: set[Place]) -> bool:
        """Says whether a module is still one where these attributes of its parts are shadowed."""
        parts = dict(self._module.named_modules())
        return all(owner in parts and name in vars(parts[owner]) and name not in _OF_TORCH for owner, name in places)


class _Snapshot:
    """The attributes of a module's parts, each as something that can be compared.

    Attributes:
        tensors: Ids of the tensors among them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._kept: list[Any] = []  # so that no id is given away meanwhile
        self.tensors: set[int] = set()
        self._values: dict[Place, Any] = {}
        named = dict(module.named_modules())
        parts = {id(part) for part in named.values()}
        for name, part in named.items():
            slots = {key: getattr(part, key) for key in _slots(type(part)) if hasattr(part, key)}
            for key, value in {**vars(part), **slots}.items():
                if key not in _LEFT_OUT:
                    self._values[name, key] = self._value(value, parts)

    def differences(self, other: _Snapshot) -> set[Place]:
        """Returns the attributes that differ, or that only one of the two has."""
        ours, theirs = self._values, other._values
        return {place for place in ours.keys() | theirs.keys() if ours.get(place) != theirs.get(place)}

    def _value(self, value: Any, parts: set[int]) -> Any:
        if isinstance(value, _PLAIN):
            return type(value), repr(value)  # NaN equals itself
        if isinstance(value, (dict, list, set)) and not value:  # as most of a module's own are
            return type(value), ""
        file = BytesIO()
        try:
            _Writer(file, parts, self).dump(value)
        except Exception:  # noqa: BLE001  # whatever an object raises that cannot be pickled
            return self.identity(value)
        return file.getvalue()

    def identity(self, value: Any) -> int:
        """Returns a number that no other object has as long as this snapshot is there."""
        self._kept.append(value)
        if isinstance(value, Tensor):
            self.tensors.add(id(value))
        return id(value)


class _Writer(pickle.Pickler):
    """Writes a value for comparison alone: nobody reads it back."""

    def __init__(self, file: BytesIO, parts: set[int], snapshot: _Snapshot) -> None:
        super().__init__(file, protocol=4)
        self._parts, self._snapshot = parts, snapshot

    def persistent_id(self, value: Any) -> Any:
        """Tells what is compared by identity, and what of its value counts too."""
        if isinstance(value, Tensor):
            # Python may have branched on a single number; graphs refer to the memory of others.
            wrapped = torch._C._functorch.is_functorch_wrapped_tensor(value)
            is_read = not wrapped and value.numel() == 1 and not value.requires_grad
            number = _number(value) if is_read else ""
            return self._snapshot.identity(value), not wrapped and value.requires_grad, number
        if isinstance(value, torch.Generator):
            return self._snapshot.identity(value), value.get_state().numpy().tobytes()
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return value.shape, value.dtype.str, blake2b(value.tobytes()).digest()
        if id(value) in self._parts or isinstance(value, _BY_IDENTITY):
            return self._snapshot.identity(value)
        return None

    def reducer_override(self, value: Any) -> Any:
        """Lets an object that cannot be pickled, such as a lock, stand for itself and its attributes."""
        try:
            value.__reduce_ex__(4)
        except Exception:  # noqa: BLE001  # whatever it raises
            return type(value), (self._snapshot.identity(value),), getattr(value, "__dict__", None)
        return NotImplemented


def _number(value: Tensor) -> str:
    """Says what a tensor of one number holds; of one on a device, which is not waited for, how often it changed."""
    return repr(value.item()) if value.device.type == "cpu" or value.is_inference() else f"version {value._version}"


def _slots(kind: type) -> list[str]:
    names: list[str] = copyreg._slotnames(kind)  # type: ignore[attr-defined]  # what copying asks for
    return names
