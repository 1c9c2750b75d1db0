"""What optimizers hold besides state and parameter groups, put back for each client."""

from copy import copy, deepcopy
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.core.optimizer.configured import parse_configured
from lightning_fed.core.seeding import isolated_streams
from lightning_fed.errors import FederatedError

__all__ = ["FreshOptimizers", "of_torch"]


def of_torch(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer is of one of torch's own classes, of which all that it holds is known."""
    return type(optimizer).__module__.startswith("torch.optim")


class FreshOptimizers:
    """What optimizers, and those within them, hold as each client of a round finds it.

    Of torch's own classes these are the objects in their attributes, but for state and groups, which the caller resets.
    Of other classes all is copied, state and groups too, but for parameters and modules. A tensor that was a copy of a
    parameter when they were built, such as a slow weight of Lookahead, becomes a copy of the client's weights.

    Args:
        module: The module whose ``configure_optimizers`` has built them.
        optimizers: The optimizers.
    """

    def __init__(self, module: LightningModule, optimizers: list[Optimizer]) -> None:
        self._module, self._given = module, optimizers
        self.copies = not all(map(of_torch, optimizers))
        # Hooks belong to those who registered them; by the mark of a step schedules know that there was one.
        self._left = {"_opt_called"} if self.copies else {"_opt_called", "state", "param_groups"}
        # Tensors that follow a parameter, as the optimizers hold them, and as they were noted.
        self._live: list[tuple[Tensor, Tensor]] = []
        self._noted: list[tuple[Tensor, Tensor]] = []
        made = self.take()
        if self.copies:
            self._noted = [(made[index], p) for index, p in self._find_weights(made)]
        self.put_back()

    def take(self) -> list[Tensor]:
        """Notes what they hold now; returns the tensors that were copied."""
        module = self._module
        kept = (vars(module).get("_trainer"), *module.modules(), *module.parameters(), *module.buffers())
        self.all = _with_inner(self._given, {id(each) for each in kept}) if self.copies else self._given
        self._same = {id(each): each for each in (*kept, *self.all)}
        self._held = [self._attributes(each) for each in self.all]
        if not self.copies:
            return []
        self._held, memo = self._copy(self._held)
        self._noted = [(memo[id(tensor)], p) for tensor, p in self._live if id(tensor) in memo]
        return [each for key, each in memo.items() if isinstance(each, Tensor) and key not in self._same]

    def put_back(self) -> None:
        """Gives them what they held."""
        held = self._held
        if self.copies:
            held, memo = self._copy(held)
            self._live = [(memo[id(tensor)], p) for tensor, p in self._noted]
        for optimizer, values in zip(self.all, held, strict=True):
            for name in self._attributes(optimizer).keys() - values.keys():
                del vars(optimizer)[name]
            vars(optimizer).update(values)

    def begin(self) -> None:
        """Starts them at the weights that the client has now, in the mode for training where they have two."""
        with torch.no_grad():
            for tensor, p in self._live:
                tensor.copy_(p)
        self.switch("train")

    def switch(self, mode: str) -> None:
        """Calls ``train`` or ``eval`` of those that have both: schedule-free ones train other weights than one uses."""
        for optimizer in self.all if self.copies else ():
            if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
                getattr(optimizer, mode)()

    def _attributes(self, optimizer: Optimizer) -> dict[str, Any]:
        return {k: v for k, v in vars(optimizer).items() if k not in self._left and not k.endswith("_hooks")}

    def _copy(self, held: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[int, Any]]:
        memo = dict(self._same)
        try:
            return deepcopy(held, memo), memo
        except Exception as error:  # whatever an object raises that cannot be copied
            name = type(self._given[0]).__name__
            raise FederatedError(
                f"Expected an optimizer that can be copied, as each client begins with a fresh one, but {name} cannot "
                f"({type(error).__name__}: {error}): choose another in `configure_optimizers` or by `--optimizer`."
            ) from error

    def _find_weights(self, tensors: list[Tensor]) -> list[tuple[int, Tensor]]:
        """Finds the tensors that are copies of parameters; returns their indices, each with its parameter."""
        parameters = [p for each in self._given for group in each.param_groups for p in group["params"]]
        found = _equal_pairs(tensors, parameters)
        if not any((tensors[index] == tensors[index].flatten()[0]).all() for index, _ in found):
            return found
        # All of one number, it may also be what a sum begins with: this shows when they are built at other weights.
        attributes, values = dict(vars(self._module)), [p.detach().clone() for p in parameters]
        try:
            for number, p in enumerate(parameters, 1):
                p.data.add_(number)
            other = copy(self)
            with isolated_streams():
                other._given, _ = parse_configured(self._module, self._module.configure_optimizers())
            return _equal_pairs(other.take(), parameters)
        finally:
            for p, value in zip(parameters, values, strict=True):
                p.data.copy_(value)
            vars(self._module).clear()
            vars(self._module).update(attributes)


def _equal_pairs(tensors: list[Tensor], parameters: list[Tensor]) -> list[tuple[int, Tensor]]:
    """Returns the indices of tensors, of any dtype, that hold the numbers of a parameter, each with the parameter."""
    return [
        (index, p)
        for index, tensor in enumerate(tensors)
        for p in parameters
        if tensor.shape == p.shape and tensor.is_floating_point() and torch.equal(tensor.to(p), p)
    ]


def _with_inner(optimizers: list[Optimizer], known: set[int]) -> list[Optimizer]:
    """Returns optimizers and those in their attributes, in lists, dicts and other objects there, outer ones first."""
    found: list[Optimizer] = []
    todo: list[Any] = list(optimizers)
    seen = set(known)
    while todo:
        each = todo.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Optimizer):
            found.append(each)
        if isinstance(each, (list, tuple)):
            todo += each
        elif isinstance(each, dict):
            todo += [value for key, value in each.items() if key not in ("params", "state")]
        elif hasattr(each, "__dict__") and not isinstance(each, (Tensor, type)) and not callable(each):
            todo.append(vars(each))
    return found
