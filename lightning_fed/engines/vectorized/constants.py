"""What a traced training step takes for constant: the attributes of the module's parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_fed.engines.attributes import Place, Snapshot
from lightning_fed.engines.vectorized.step import CannotTrace

__all__ = ["Constants", "Refusing"]

# Without these a module is none.
_OF_TORCH = frozenset(vars(nn.Module()))
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


for _name in (
    "bool", "eq", "ne", "lt", "le", "gt", "ge", "hash", "int", "index", "float", "str", "repr", "format", "neg", "add",
    "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow",
    "call", "len", "iter", "contains", "getitem", "setitem", "getattr", "enter", "abs",
):  # fmt: skip
    setattr(Refusing, f"__{_name}__", _refuse)


class Constants:
    """Notices which attributes of a module's parts have changed since it was last asked.

    A graph repeats operations, not Python: a temperature that a callback lowers from round to round would stay what it
    was. Global variables, what functions close over, and attributes of classes are not followed.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._held = Snapshot(module, by_identity=(Refusing,))

    @property
    def tensors(self) -> set[int]:
        """The ids of the tensors that attributes held when they were last compared."""
        return self._held.tensors

    def changed(self) -> set[Place]:
        """Returns the attributes that are others than they were."""
        before, self._held = self._held, Snapshot(self._module, by_identity=(Refusing,))
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
        before = Snapshot(self._module, by_identity=(Refusing,))
        yield
        for shadow in shadows:
            if vars(shadow)["asked"]:
                raise CannotTrace(vars(shadow)["reason"])
        if changed := Snapshot(self._module, by_identity=(Refusing,)).differences(before):
            raise CannotTrace(f"its training changes its attribute `{min(changed)[1]}`")

    def can_be_shadowed(self, places: set[Place]) -> bool:
        """Says whether a module is still one where these attributes of its parts are shadowed."""
        parts = dict(self._module.named_modules())
        return all(owner in parts and name in vars(parts[owner]) and name not in _OF_TORCH for owner, name in places)
