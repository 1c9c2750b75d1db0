"""The module's optimizer over flat vectors: one long tensor is stepped instead of every parameter by itself."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import SGD, Optimizer

from lightning_fed.core.vector import ParameterVector

__all__ = ["ELEMENTWISE", "FlatOptimizer", "SHARED_STATE"]

# Optimizers that step each weight by its own gradients only: a whole vector or matrix then steps like its parts.
ELEMENTWISE: tuple[type[Optimizer], ...] = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Adagrad,
    optim.Adadelta, optim.ASGD, optim.Rprop,
)  # fmt: skip
# The entries of their state that hold one number for a whole parameter; the others have one for each weight.
SHARED_STATE = frozenset(("step", "mu_product", "eta", "mu"))
# Those that have a fused kernel (one pass over the memory) on the CPU too.
_FUSED = (optim.SGD, optim.Adam, optim.AdamW)


class FlatOptimizer:
    """Steps a flat vector, or the first rows of a matrix of them, as the module's optimizer would step each parameter.

    Parameters that lie side by side in the flat vector, and in one group, are stepped as one tensor. In float32 and
    float64, without fused kernels, the weights on a CPU are those of the module's own optimizer to the bit.

    Args:
        optimizer: The module's optimizer, of one of the classes ``ELEMENTWISE``. It is never stepped; its
            hyper-parameters are read at every step.
        vector: Says where its parameters lie in the flat vector.
        weights: The flat vector, shape (d,), or n of them, shape (n, d); stepped in place.
        gradients: Their gradients, of the same shape; the caller writes them before each step.
        initial: The optimizer's state before any step, by parameter; by default its present state.
        fuse: Whether to use a fused kernel (one pass over the memory) where there is one and the module's optimizer
            does not forbid it; its results differ in the last bits.
        part: The parameters that it steps, of those in ``vector.all_parameters``.
        apart: Whether each parameter is stepped as a tensor of its own, so that ``skip`` may leave some out.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        vector: ParameterVector,
        weights: Tensor,
        gradients: Tensor,
        initial: Mapping[Tensor, dict[str, Any]] | None = None,
        fuse: bool = False,
        part: slice = slice(None),
        apart: bool = False,
    ) -> None:
        initial = optimizer.state if initial is None else initial
        self.weights, self._gradients, self._user = weights, gradients, optimizer
        places = dict(list(vector.all_places().items())[part])
        slices = [[places[p] for p in group["params"] if p in places] for group in optimizer.param_groups]
        self._slices = slices if apart else [_joined(each) for each in slices]
        # Copied, because the arguments of its constructor differ from the options of a group.
        self._optimizer = copy(optimizer)
        self._optimizer.state = defaultdict(dict)
        self._optimizer.param_groups = [
            {**group, "params": [weights.detach()[..., part] for part in slices]}
            for group, slices in zip(optimizer.param_groups, self._slices, strict=True)
        ]
        # A fused kernel expects the state in the memory layout of the weights, but that of a few columns is compact; on
        # a CPU that of torch 2.11 for SGD leaves most numbers of a vector of 16 bits as they are.
        narrow = weights.device.type == "cpu" and weights.element_size() < 4
        self._unfused = narrow or (weights.ndim > 1 and self._slices != [[slice(0, vector.all_numel)]])
        self._fuse = fuse and not self._unfused and type(optimizer) in _FUSED and weights.device.type in ("cpu", "cuda")
        self._by_hand = type(optimizer) is SGD and weights.device.type == "cpu" and not self._fuse
        self._buffers: dict[Tensor, Tensor] = {}
        self._views: dict[Tensor, list[Tensor]] = {}
        groups = zip(self._slices, self._optimizer.param_groups, strict=True)
        # The parts of the flat vector that are stepped as one tensor, each with its tensor.
        self._parts = [pair for slices, group in groups for pair in zip(slices, group["params"], strict=True)]
        # The indices of the parameters in each part.
        self._places, starts = places, [place.start for place in places.values()]
        self._members = {t: slice(bisect_left(starts, p.start), bisect_left(starts, p.stop)) for p, t in self._parts}
        joined = {tensor: _joined_state(initial, places, part, tensor) for part, tensor in self._parts}
        self._initial = {tensor: state for tensor, state in joined.items() if state}
        self._bind(weights, gradients)
        self.start()

    def start(self, count: int | None = None) -> None:
        """Begins with fresh state, for the first ``count`` rows of a matrix."""
        self._optimizer.state.clear()
        for tensor, state in self._initial.items():
            self._optimizer.state[tensor] = deepcopy(state)
        if self.weights.ndim > 1:
            self.narrow(len(self.weights) if count is None else count)

    def narrow(self, count: int) -> None:
        """Steps only the first ``count`` rows of a matrix until the next start."""
        self._bind(self.weights[:count], self._gradients[:count])
        for state in self._optimizer.state.values():
            state.update({key: value[:count] for key, value in state.items() if key not in SHARED_STATE})

    def skip(self, missed: list[slice]) -> None:
        """Leaves parts of the vector, and their state, out of the next steps, as torch does without a gradient."""
        if missed == self._missed:
            return
        self._missed: list[slice] = missed
        for part, tensor in self._parts:
            tensor.grad = None if part in missed else self._gradients[..., part]

    def _bind(self, weights: Tensor, gradients: Tensor) -> None:
        self._missed = []
        for part, tensor in self._parts:
            tensor.grad = None
            tensor.data = weights[..., part]
            tensor.grad = gradients[..., part]

    @property
    def takes_each(self) -> bool:
        """Whether ``step`` accepts a list of gradients, one for each parameter."""
        return self._by_hand and self.weights.ndim == 1 and all(map(_is_plain, self._user.param_groups))

    def step(self, each: list[Tensor] | None = None) -> None:
        """Takes one step with the hyper-parameters that the module's optimizer has now.

        Args:
            each: A gradient for each parameter, used instead of ``gradients``; only where ``takes_each``.
        """
        if each is not None or (self._by_hand and all(map(_is_plain, self._user.param_groups))):
            for own, group in zip(self._optimizer.param_groups, self._user.param_groups, strict=True):
                for weights in own["params"]:
                    self._step_sgd(weights, group, each)
            return
        for own, group in zip(self._optimizer.param_groups, self._user.param_groups, strict=True):
            own.update({**group, "params": own["params"]})
            if self._unfused and own.get("fused"):
                own["fused"] = False
            elif self._fuse and own.get("fused") is None and not own.get("foreach"):
                own["fused"] = True
        self._optimizer.step()

    def _step_sgd(self, weights: Tensor, group: dict[str, Any], each: list[Tensor] | None) -> None:
        """Does what ``torch.optim.SGD`` does, by the same operations, at a fraction of the fixed cost of its step."""
        gradient, momentum = weights.grad, group["momentum"]
        if gradient is None:
            return
        gradients = [gradient] if each is None else each[self._members[weights]]
        moved = [weights] if each is None else self._cut(weights, weights)
        if group["maximize"]:
            gradients = list(torch._foreach_neg(gradients))
        if group["weight_decay"] != 0:
            gradients = list(torch._foreach_add(gradients, moved, alpha=group["weight_decay"]))
        if momentum != 0:
            state = self._optimizer.state[weights]
            buffer = state.get("momentum_buffer")
            first = buffer is None
            if buffer is None:
                buffer = state["momentum_buffer"] = self._buffer(weights)
            parts = [buffer] if each is None else self._cut(buffer, weights)
            if first:
                torch._foreach_copy_(parts, gradients)
            else:
                buffer.mul_(momentum)
                torch._foreach_add_(parts, gradients, alpha=1 - group["dampening"])
            if not group["nesterov"]:
                weights.add_(buffer, alpha=-group["lr"])
                return
            gradients = list(torch._foreach_add(gradients, parts, alpha=momentum))
        torch._foreach_add_(moved, gradients, alpha=-group["lr"])

    def _buffer(self, weights: Tensor) -> Tensor:
        kept = self._buffers.get(weights)
        if kept is None or len(kept) < len(weights):
            kept = self._buffers[weights] = torch.empty_like(weights)
        return kept[: len(weights)] if weights.ndim > 1 else kept

    def _cut(self, whole: Tensor, weights: Tensor) -> list[Tensor]:
        """Cuts weights of a part, or their momentum, into views of the parameters in it."""
        views = self._views.get(whole)
        if views is None:
            within = list(self._places.items())[self._members[weights]]
            start = whole.storage_offset() - within[0][1].start
            views = [whole.as_strided(p.shape, p.stride(), start + place.start) for p, place in within]
            self._views[whole] = views
        return views

    @property
    def num_states(self) -> int:
        """How many parts have a state."""
        return len(self._optimizer.state)

    def states(self) -> list[tuple[slice, dict[str, Any]]]:
        """Returns the optimizer's state of each part of the flat vector that has one."""
        state = self._optimizer.state
        return [(part, state[tensor]) for part, tensor in self._parts if tensor in state]


def _joined_state(
    initial: Mapping[Tensor, dict[str, Any]], places: dict[Tensor, slice], part: slice, like: Tensor
) -> dict[str, Any]:
    """Joins the initial state of the parameters in a part; some optimizers, such as Adagrad, begin with state."""
    joined: dict[str, Any] = {}
    for p, place in places.items():
        if place.start < part.start or place.stop > part.stop:
            continue
        for key, value in initial.get(p, {}).items():
            if key in SHARED_STATE:
                joined[key] = value
                continue
            numbers = value.new_empty(p.numel())
            numbers.as_strided(p.shape, p.stride()).copy_(value)
            whole = joined.setdefault(key, torch.zeros_like(like, dtype=value.dtype))
            whole[..., place.start - part.start : place.stop - part.start] = numbers
    return joined


def _is_plain(group: dict[str, Any]) -> bool:
    """Returns whether a group of SGD has plain numbers as options and uses torch's default kernels."""
    numbers = type(group["lr"]) is float and type(group["weight_decay"]) in (float, int)
    return numbers and not group["fused"] and not group["differentiable"]


def _joined(parts: Iterable[slice]) -> list[slice]:
    joined: list[slice] = []
    for part in sorted(parts, key=lambda part: part.start):
        if joined and joined[-1].stop == part.start:
            joined[-1] = slice(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined
