"""One step of the flat vector instead of one step for each parameter, where the result is bit-identical."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_fed.core.optimizer.flat import ELEMENTWISE, SHARED_STATE, FlatOptimizer
from lightning_fed.core.vector import ParameterVector

__all__ = ["FlatStep"]


class FlatStep:
    """Steps the flat vector instead of the module's optimizer; on a CPU the weights are the same to the bit.

    Hooks and schedules still see the module's optimizer: its hyper-parameters are read at every step, hooks after its
    step are called, and its ``state`` holds views of the flat state, which hooks may write to. If an entry of the state
    is replaced, or a parameter has no gradient or is no longer a view of the vector, the module's optimizer takes the
    client's further steps itself, from this state. The arguments are those of ``FlatOptimizer``.

    Attributes:
        steps: Steps taken this way, over all clients.
    """

    def __init__(self, optimizer: Optimizer, vector: ParameterVector, initial: Mapping[Tensor, dict[str, Any]]) -> None:
        self._optimizer, self._vector, self._initial = optimizer, vector, initial
        self._state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        self._shown: list[Tensor] = []  # what the state was filled with, in its order
        self._memory: list[Tensor] = []  # the flat state that it is a view of
        self._views: list[tuple[Tensor, str, Tensor]] = []
        # Step counts for each parameter: copies of the flat count, which hooks may have changed since.
        self._counts: list[tuple[Tensor, Tensor]] = []
        self._versions: list[int] = []
        self._num_states = 0
        self._flat: FlatOptimizer | None = None
        self._places: list[tuple[Tensor, slice]] = []
        self._outside: list[Tensor] = []
        self._num_groups, self._stale, self._active = 0, True, False
        self.steps = 0

    def start_round(self) -> None:
        """Finds out anew, with the next client, which parameters the optimizer holds."""
        self._stale = True

    def start_client(self) -> bool:
        """Forgets the last client; False if the module's optimizer has to step by itself."""
        self._active = False
        replaced = vars(self._optimizer).get("step")  # by a schedule, to count steps, or by user code
        if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
            return False
        if self._stale or self._flat is None or self._flat.weights is not self._vector.all_data:
            self._build()
        if self._flat is None:
            return False
        self._flat.start()
        self._optimizer.state = self._state
        self._state.clear()
        self._shown, self._num_states = [], 0
        if self._counts:  # the last client's counts are copies, not views
            self._memory, self._counts, self._versions = [], [], []
        if self._flat.num_states:
            self._show()
        self._active = True
        return True

    def _build(self) -> None:
        """Prepares to step the flat vector, if the optimizer and the vector allow for it."""
        vector, groups = self._vector, self._optimizer.param_groups
        # In bfloat16 the last elements of a tensor are rounded differently from the others; so do fused kernels on a
        # CPU. Other devices promise no bit-identical results, and a fused kernel is the fastest there.
        exact, on_cpu = vector.dtype in (torch.float32, torch.float64), vector.device.type == "cpu"
        self._flat, self._stale = None, False
        as_fused = on_cpu and any(group.get("fused") for group in groups)
        if type(self._optimizer) in ELEMENTWISE and exact and not as_fused:
            initial = self._initial
            self._flat = FlatOptimizer(
                self._optimizer, vector, vector.all_data, vector.all_grad, initial, fuse=not on_cpu
            )
            self._num_groups = len(groups)
            places = vector.all_places()
            held = [p for group in groups for p in group["params"]]
            self._places = [(p, places[p]) for p in held if p in places]
            self._outside = [p for p in held if p not in places]

    def step(self) -> bool:
        """Takes a step of all parameters; False if the module's optimizer has to take it."""
        own, vector, flat = self._optimizer, self._vector, self._flat
        each = vector.loose_gradients() if flat is not None and flat.takes_each else None
        if each is None:
            vector.collect_gradients()
        if not (self._active and self._may_step(each is None)):
            self._active = False
            return False
        assert flat is not None
        flat.step(each)
        if flat.num_states != self._num_states:
            self._show()
        elif self._counts:
            self._show_counts()
        self.steps += 1
        own._opt_called = True  # type: ignore[attr-defined]  # what schedules look for
        for hook in own._optimizer_step_post_hooks.values():
            hook(own, (own,), {})
        return True

    def _may_step(self, collected: bool) -> bool:
        own = self._optimizer
        if own._optimizer_step_pre_hooks or len(own.param_groups) != self._num_groups:
            return False
        if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
            return False
        if any(p.grad is not None for p in self._outside):
            return False
        if not self._vector.in_place or (collected and not self._vector.whole):
            return False
        # The state must hold what it was filled with, and nothing else.
        if own.state is not self._state or not _same(_tensors(self._state.values()), self._shown):
            return False
        return [count._version for count, _ in self._counts] == self._versions

    def _show(self) -> None:
        """Fills the optimizer's state with views of the flat state; new views are made if its memory changed."""
        assert self._flat is not None
        states = self._flat.states()
        memory = _tensors(state for _, state in states)
        if not _same(memory, self._memory):
            self._memory, self._views = memory, self._view(states)
        self._state.clear()
        for p, key, view in self._views:
            self._state[p][key] = view
        self._shown, self._num_states = _tensors(self._state.values()), self._flat.num_states
        self._show_counts()

    def _show_counts(self) -> None:
        for own, flat in self._counts:
            own.copy_(flat)
        self._versions = [own._version for own, _ in self._counts]

    def _view(self, states: list[tuple[slice, dict[str, Any]]]) -> list[tuple[Tensor, str, Tensor]]:
        """Returns views of the flat state by parameter and entry."""
        views: list[tuple[Tensor, str, Tensor]] = []
        self._counts = []
        for part, state in states:
            inside = [(p, at.start - part.start) for p, at in self._places if part.start <= at.start < part.stop]
            for key, flat in state.items():
                if key in SHARED_STATE:
                    own = flat.repeat(len(inside))
                    self._counts.append((own, flat))
                    each = own.unbind()
                else:
                    start = flat.storage_offset()
                    each = [flat.as_strided(p.shape, p.stride(), start + offset) for p, offset in inside]
                views += [(p, key, view) for (p, _), view in zip(inside, each, strict=True)]
        return views


def _tensors(states: Iterable[dict[str, Any]]) -> list[Tensor]:
    return [value for state in states for value in state.values()]


def _same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))
