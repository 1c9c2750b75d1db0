"""A client's optimizer for many clients at once."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_fed.vector import ParameterVector

__all__ = ["ELEMENTWISE", "StackedOptimizer"]

# What steps each weight by its own gradients alone, so that a matrix of weight vectors steps like each vector.
ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Adagrad,
    optim.Adadelta, optim.ASGD, optim.Rprop,
)  # fmt: skip

# Those with a kernel of one pass on the CPU too; its results differ in the last bits.
_FUSED = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)


class StackedOptimizer:
    """Steps the first rows of a matrix of weight vectors as the module's optimizer would step each of them.

    Parameters that lie side by side in the flat vector, and in one group, are stepped as one tensor.

    Args:
        optimizer: The module's optimizer, of one of the classes ``ELEMENTWISE``; its hyper-parameters are read at
            every step.
        vector: Says where its parameters lie in the flat vector.
        weights: The weight vectors, shape (n, d).
    """

    def __init__(self, optimizer: Optimizer, vector: ParameterVector, weights: Tensor) -> None:
        self._user, self._weights = optimizer, weights
        places = _places(vector)
        self._slices = [_joined(places[id(p)] for p in g["params"] if id(p) in places) for g in optimizer.param_groups]
        self._groups = [at for at, slices in enumerate(self._slices) if slices]
        self._whole = self._slices == [[slice(0, vector.numel)]]
        self._may_fuse = type(optimizer) in _FUSED and weights.device.type in ("cpu", "cuda")
        parameters = [[nn.Parameter(weights[:, part]) for part in self._slices[at]] for at in self._groups]
        groups = [{**self._options(at), "params": p} for at, p in zip(self._groups, parameters, strict=True)]
        build: Any = type(optimizer)
        self._optimizer: Optimizer = build(groups)
        # Some, such as Adagrad, fill their state when they are built.
        self._initial = {p: deepcopy(state) for p, state in self._optimizer.state.items()}
        self._count = 0

    def _options(self, at: int) -> dict[str, Any]:
        options = {key: value for key, value in self._user.param_groups[at].items() if key != "params"}
        if not self._whole:  # a fused kernel takes a state for as wide as its parameter, and that of a part is compact
            return {**options, "fused": False} if options.get("fused") else options
        if self._may_fuse and options.get("fused") is None and not options.get("foreach"):
            return {**options, "fused": True}
        return options

    def start(self, count: int) -> None:
        """Begins with fresh state for the first ``count`` rows."""
        self._optimizer.state.clear()
        for parameter, state in self._initial.items():
            self._optimizer.state[parameter] = deepcopy(state)
        self._count = len(self._weights)
        self.narrow(count)

    def narrow(self, count: int) -> None:
        """Goes on with the first ``count`` rows alone."""
        for at, group in zip(self._groups, self._optimizer.param_groups, strict=True):
            for part, parameter in zip(self._slices[at], group["params"], strict=True):
                parameter.grad, parameter.data = None, self._weights[:count, part]
                state = self._optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.ndim == 2:
                        state[key] = value[:count]
        self._count = count

    def step(self, gradients: Tensor) -> None:
        """Takes one step with the hyper-parameters that the module's optimizer has now.

        Args:
            gradients: Those of the rows that step, and maybe of others after them, shape (m, d).
        """
        for at, group in zip(self._groups, self._optimizer.param_groups, strict=True):
            group.update(self._options(at))
            for part, parameter in zip(self._slices[at], group["params"], strict=True):
                parameter.grad = gradients[: self._count, part]
        self._optimizer.step()


def _places(vector: ParameterVector) -> dict[int, slice]:
    """Where each parameter lies in the flat vector, by identity."""
    places, offset = {}, 0
    for parameter in vector.parameters:
        places[id(parameter)] = slice(offset, offset + parameter.numel())
        offset += parameter.numel()
    return places


def _joined(parts: Any) -> list[slice]:
    """Joins slices that touch."""
    joined: list[slice] = []
    for part in sorted(parts, key=lambda part: part.start):
        if joined and joined[-1].stop == part.start:
            joined[-1] = slice(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined
