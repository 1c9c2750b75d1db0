"""What a traced training step takes for constant: the attributes that its Python reads or writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_fed.engines.vectorized.step import CannotTrace

__all__ = ["BakedState"]

# Swapped while a step is traced, and inputs of the graph.
_INPUTS = frozenset({"_parameters", "_buffers", "log"})
# Read by way of `__dict__`, where nobody sees it. Which parameters there are matters: frozen ones are constants.
_ALWAYS = ("_parameters", "_modules")
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_BY_IDENTITY = (Tensor, type, FunctionType, BuiltinFunctionType, property, classmethod, staticmethod)
_NOTHING: Any = object()


@dataclass(frozen=True, slots=True)
class _Place:
    """An attribute of a part as it was when it was first touched.

    Attributes:
        part: The part.
        name: The attribute's name.
        held: The part's own attributes.
        own: The object among them, ``_NOTHING`` if there was none.
        value: What it must stay equal to, frozen; of its class where the part had none of its own.
        is_fixed: Whether it is the same as long as the object is.
        is_empty: Whether it is an empty container, and the same as long as it is one.
    """

    part: nn.Module
    name: str
    held: dict[str, Any]
    own: Any
    value: Any
    is_fixed: bool
    is_empty: bool


class BakedState:
    """Notes which attributes of a module's parts are touched within a block, and says later whether they have changed.

    A graph repeats operations, not Python: a temperature that a callback lowers from round to round would stay what it
    was. Attributes are compared by value where they are numbers, strings, arrays, tensors of one element, containers or
    plain objects of such, and by identity where they are other tensors, parts of the module or functions. Global
    variables, and what functions close over, are not followed.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts: dict[int, nn.Module] = {}
        self._places: dict[tuple[int, str], _Place] = {}
        self._asked_trainer = False

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes what is touched within the block.

        Raises:
            CannotTrace: If the trainer is read, which is another one in every round, if an attribute that was touched
                has changed at the end of the block, or if a part keeps its attributes where nobody sees them read.
        """
        self._parts = {id(part): part for part in self._module.modules()}
        for name, part in self._module.named_modules():
            if isinstance(part, torch.jit.ScriptModule):
                raise CannotTrace(f"its part `{name}` is a ScriptModule, whose attributes torch reads out of sight")
        for part in self._parts.values():
            for name in _ALWAYS:
                self._note(part, name)
        with _watching(self._touch):
            yield
        self._expect_no_trainer()  # also where the module catches every exception
        if changed := self.changed():
            raise CannotTrace(f"its training changes its attribute `{changed}`")

    def changed(self) -> str | None:
        """Names an attribute that has changed since it was first touched, None if there is none."""
        for place in self._places.values():
            is_own = place.held.get(place.name, _NOTHING) is place.own
            if is_own and (place.is_fixed or (place.is_empty and not place.own)):  # as most are: this is asked often
                continue
            if self._value(place.part, place.name) != place.value:
                return place.name
        return None

    def _touch(self, part: nn.Module, name: str) -> None:
        if id(part) not in self._parts or name.startswith("__") or name in _INPUTS:
            return
        if name == "_trainer":
            self._asked_trainer = True
            self._expect_no_trainer()
        self._note(part, name)

    def _expect_no_trainer(self) -> None:
        if self._asked_trainer:
            raise CannotTrace("its training reads the trainer, which is not the same in every round")

    def _note(self, part: nn.Module, name: str) -> None:
        if (id(part), name) in self._places:
            return
        held = vars(part)
        own, value = held.get(name, _NOTHING), self._value(part, name)
        is_fixed = value is None or isinstance(value, _Same) or isinstance(own, _PLAIN)
        is_empty = isinstance(own, (dict, list, set)) and not own
        self._places[id(part), name] = _Place(part, name, held, own, value, is_fixed, is_empty)

    def _value(self, part: nn.Module, name: str) -> Any:
        """Freezes an attribute of a part itself, else that of its class, which its own would go before."""
        own = vars(part)
        if name in own:
            return self._frozen(own[name], {})
        for kind in type(part).__mro__:
            if name in vars(kind):
                found = vars(kind)[name]
                return self._frozen(_in_slot(found, part), {})
        return None

    def _frozen(self, value: Any, seen: dict[int, Any]) -> Any:
        """Returns what two values have in common exactly if a traced step cannot tell them apart.

        Args:
            value: The value.
            seen: What it is part of, by id; kept here, so that no id is given away meanwhile.
        """
        if isinstance(value, _PLAIN):
            return type(value), repr(value)  # NaN equals itself
        if isinstance(value, Tensor) and _is_number(value):
            return _Same(value), repr(value.item())
        if id(value) in self._parts or id(value) in seen or isinstance(value, _BY_IDENTITY):
            return _Same(value)
        seen[id(value)] = value
        if isinstance(value, np.ndarray):
            return value.shape, value.dtype.str, blake2b(value.tobytes()).digest()
        if isinstance(value, dict):
            return type(value), [(self._frozen(k, seen), self._frozen(v, seen)) for k, v in value.items()]
        if isinstance(value, (list, tuple, deque)):
            return type(value), [self._frozen(each, seen) for each in value]
        if isinstance(value, (set, frozenset)):
            return type(value), frozenset(value)
        if isinstance(value, MethodType):
            return _Same(value.__func__), self._frozen(value.__self__, seen)
        state = _state(value)
        return (type(value), [self._frozen(each, seen) for each in state]) if state else _Same(value)


class _Same:
    """Equal to what holds the same object; it keeps the object, so that no other one takes its place in memory."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._held is other._held

    __hash__ = None  # type: ignore[assignment]  # compared alone


@contextmanager
def _watching(touch: Callable[[nn.Module, str], None]) -> Iterator[None]:
    """Within the block, tells of every attribute of a module that is read, set or deleted, before it is."""

    def watched(plain: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: nn.Module, name: str, *value: Any) -> Any:
            touch(self, name)
            return plain(self, name, *value)

        return method

    names = ("__getattribute__", "__setattr__", "__delattr__")
    former = {name: vars(nn.Module).get(name) for name in names}
    try:
        # In the class of all modules: an instance's own class stays what it is.
        for name in names:
            setattr(nn.Module, name, watched(getattr(nn.Module, name)))
        yield
    finally:
        for name, method in former.items():
            if method is None:
                delattr(nn.Module, name)
            else:
                setattr(nn.Module, name, method)


def _in_slot(found: Any, part: nn.Module) -> Any:
    """Returns what a class attribute stands for: a slot for the instance's own value."""
    if not isinstance(found, MemberDescriptorType):
        return found
    try:
        return found.__get__(part)
    except AttributeError:
        return None


def _is_number(tensor: Tensor) -> bool:
    """Says whether Python may have branched on a tensor's value; graphs refer to the memory of others."""
    is_one = tensor.numel() == 1 and not tensor.requires_grad
    return is_one and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _state(value: Any) -> list[Any]:
    """Returns what makes up an object: its attributes, and what pickling would keep, such as where a stream stands."""
    state: list[Any] = [vars(value)] if hasattr(value, "__dict__") else []
    try:
        state.append(value.__reduce_ex__(2))
    except Exception:  # noqa: BLE001  # whatever an object raises that cannot be pickled
        return state
    return state
