"""One step of the flat vector instead of one of every parameter, wherever nobody can tell the difference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_fed.core.optimizer.flat import ELEMENTWISE, SHARED_STATE, FlatOptimizer
from lightning_fed.core.vector import ParameterVector

__all__ = ["FlatStep", "LazyState"]


class LazyState(defaultdict[Tensor, dict[str, Any]]):
    """The ``state`` of an optimizer, filled when somebody first looks at it.

    Args:
        *args: Those of defaultdict, for copies, which are ordinary ones; an empty one without.

    Attributes:
        fill: Returns what it holds; None when it is an ordinary one.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*(args or (dict,)))
        self.fill: Callable[[], dict[Tensor, dict[str, Any]]] | None = None

    def open(self) -> None:
        """Becomes an ordinary one."""
        fill, self.fill = self.fill, None
        if fill is not None:
            self.update(fill())

    def close(self, fill: Callable[[], dict[Tensor, dict[str, Any]]]) -> None:
        """Empties itself until somebody looks."""
        self.fill = None
        self.clear()
        self.fill = fill


def _opening(name: str) -> Callable[..., Any]:
    plain = getattr(defaultdict, name)

    def method(self: LazyState, *args: Any, **kwargs: Any) -> Any:
        self.open()
        return plain(self, *args, **kwargs)

    return method


for _name in (
    "__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__reversed__", "__len__", "__eq__",
    "__ne__", "__or__", "__ror__", "__ior__", "__repr__", "__reduce__", "__copy__", "copy", "keys", "values", "items",
    "get", "pop", "popitem", "setdefault", "update", "clear",
):  # fmt: skip
    setattr(LazyState, _name, _opening(_name))


class FlatStep:
    """Steps the flat vector in place of the module's optimizer, with the same bits in the weights.

    The module's optimizer stays the one that hooks and schedules see: its hyper-parameters are read at every step, and
    hooks after its step are called. As soon as somebody looks at its ``state``, or a parameter has no gradient or
    another memory than its part of the vector, it steps by itself until the next client, from the state of this one.

    Args:
        optimizer: The module's optimizer.
        vector: The flat vector.
        initial: The optimizer's state as it was built.

    Attributes:
        steps: Steps taken this way, over all clients.
    """

    def __init__(self, optimizer: Optimizer, vector: ParameterVector, initial: Mapping[Tensor, dict[str, Any]]) -> None:
        self._optimizer, self._vector, self._initial = optimizer, vector, initial
        self._state = LazyState()
        self._flat: FlatOptimizer | None = None
        self._outside: list[Tensor] = []
        self._num_groups, self._stale = 0, True
        self.steps = 0

    def start_round(self) -> None:
        """Finds out anew, with the next client, which parameters the optimizer holds."""
        self._stale = True

    def start_client(self) -> bool:
        """Forgets the last client; False if the module's optimizer has to step by itself."""
        replaced = vars(self._optimizer).get("step")  # by a schedule, which counts, or by somebody else
        if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
            return False
        if self._stale or self._flat is None or self._flat.weights is not self._vector.data:
            self._build()
        if self._flat is None:
            return False
        self._flat.start()
        self._optimizer.state = self._state
        self._state.close(self._shown)
        return True

    def _build(self) -> None:
        """Prepares to step the flat vector, if the optimizer and the vector allow for it."""
        vector, groups = self._vector, self._optimizer.param_groups
        # In bfloat16 the last elements of a tensor are rounded otherwise than the others, and so do fused kernels.
        exact = vector.dtype in (torch.float32, torch.float64) and vector.device.type == "cpu"
        self._flat, self._stale, self._state.fill = None, False, None
        if type(self._optimizer) in ELEMENTWISE and exact and not any(group.get("fused") for group in groups):
            self._flat = FlatOptimizer(self._optimizer, vector, vector.data, vector.grad, self._initial)
            self._num_groups = len(groups)
            places = vector.places()
            self._outside = [p for group in groups for p in group["params"] if p not in places]

    def step(self) -> bool:
        """Takes a step of all parameters; False if the module's optimizer has to take it."""
        own = self._optimizer
        if own.state is not self._state or self._state.fill is None:
            return False
        if not self._may_step():
            self._state.open()
            return False
        assert self._flat is not None
        self._flat.step()
        self.steps += 1
        own._opt_called = True  # type: ignore[attr-defined]  # what schedules look for
        for hook in own._optimizer_step_post_hooks.values():
            hook(own, (own,), {})
        return True

    def _may_step(self) -> bool:
        own = self._optimizer
        if own._optimizer_step_pre_hooks or len(own.param_groups) != self._num_groups:
            return False
        if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
            return False
        for p in self._outside:
            if p.grad is not None:
                return False
        return self._vector.whole

    def _shown(self) -> dict[Tensor, dict[str, Any]]:
        """Returns the state of each parameter, for the optimizer to go on from: views of the flat one."""
        assert self._flat is not None
        shown = {}
        for part, state in self._flat.states():
            for p, place in self._vector.places().items():
                if part.start <= place.start and place.stop <= part.stop:
                    shown[p] = {
                        # Each parameter counts its steps by itself.
                        key: deepcopy(value) if key in SHARED_STATE else _view(value, p, place.start - part.start)
                        for key, value in state.items()
                    }
        return shown


def _view(flat: Tensor, parameter: Tensor, offset: int) -> Tensor:
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset() + offset)
