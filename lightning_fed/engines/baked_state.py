"""What a traced training step takes for constant: the attributes that its Python reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_fed.engines.stacked_step import CannotTrace

__all__ = ["BakedState"]

# Swapped while a step is traced, and inputs of the graph (or, frozen, constants that it refers to).
_INPUTS = frozenset({"__dict__", "_parameters", "_buffers", "log"})
_OF_THE_RUN = frozenset({"_trainer", "_fabric"})
_DEPTH = 3


class BakedState:
    """Notes which attributes of a module's parts are read within a block, and says later whether they have changed.

    A graph repeats operations, not Python: a temperature that a callback lowers from round to round would stay what it
    was. Attributes are compared by value where they are numbers, strings, containers or plain objects of such, and by
    identity where they are tensors, modules or functions. Global variables are not followed.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._reads: dict[tuple[int, str], tuple[nn.Module, str]] = {}
        self._values: dict[tuple[int, str], Any] = {}

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes what is read within the block.

        Raises:
            CannotTrace: If the trainer is read, which is another one in every round, or an attribute that was read has
                changed at the end of the block.
        """
        parts = list(self._module.modules())
        kinds = [type(part) for part in parts]
        watched = {kind: _watched(kind, self._reads) for kind in set(kinds)}
        before: dict[tuple[int, str], Any] = {}
        for part in parts:
            before.update({(id(part), name): _frozen(value) for name, value in vars(part).items()})
        try:
            for part, kind in zip(parts, kinds, strict=True):
                part.__class__ = watched[kind]
            yield
        finally:
            for part, kind in zip(parts, kinds, strict=True):
                part.__class__ = kind
        self._values = {place: before[place] for place in self._reads}
        if changed := self.changed():
            raise CannotTrace(f"its training changes its attribute `{changed}`")

    def changed(self) -> str | None:
        """Names an attribute that has changed since it was read, None if there is none."""
        for place, (part, name) in self._reads.items():
            if _frozen(vars(part).get(name)) != self._values[place]:
                return name
        return None


def _watched(kind: type[nn.Module], reads: dict[tuple[int, str], tuple[nn.Module, str]]) -> type[nn.Module]:
    """Derives a class that notes which attributes of its instances are read."""

    def getattribute(self: nn.Module, name: str) -> Any:
        if name in _OF_THE_RUN:
            raise CannotTrace("its training reads the trainer, which is not the same in every round")
        if name not in _INPUTS and name in object.__getattribute__(self, "__dict__"):
            reads[id(self), name] = (self, name)
        return kind.__getattribute__(self, name)

    return type(kind.__name__, (kind,), {"__getattribute__": getattribute, "__module__": kind.__module__})


def _frozen(value: Any, depth: int = _DEPTH) -> Any:
    """Returns what two values have in common exactly if a traced step cannot tell them apart."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return type(value).__name__, repr(value)  # NaN equals itself
    if isinstance(value, (Tensor, nn.Module, type)) or callable(value) or depth == 0:
        return _Same(value)
    if isinstance(value, dict):
        return tuple((_frozen(key, 1), _frozen(each, depth - 1)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(each, depth - 1) for each in value)
    if hasattr(value, "__dict__"):
        return _Same(value), _frozen(vars(value), depth - 1)
    return _Same(value)


class _Same:
    """Equal to what holds the same object; it keeps the object, so that no other one takes its place in memory."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._held is other._held

    __hash__ = None  # type: ignore[assignment]  # compared alone
