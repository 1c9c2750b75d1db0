"""What a module's configure_optimizers returns, and what its optimizers hold, put back for each client."""

from copy import copy, deepcopy
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_fed.core.seeding import isolated_streams
from lightning_fed.errors import FederatedError

__all__ = ["FreshOptimizers", "expect_own_parameters", "of_torch", "parse_configured"]

_SCHEDULER_KEYS = frozenset(LRSchedulerConfig.__dataclass_fields__)


def expect_own_parameters(module: LightningModule, optimizers: list[Optimizer]) -> None:
    """Refuses tensors that are no parameters of the module: no client would send them back."""
    own = {id(p) for p in module.parameters()}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    foreign = [p for group in groups for p in group["params"] if id(p) not in own]
    if foreign:
        raise FederatedError(
            f"Expected the optimizer of `{type(module).__name__}.configure_optimizers` to hold only parameters of "
            f"the module, got another tensor of shape {tuple(foreign[0].shape)}: register it as nn.Parameter."
        )


def parse_configured(module: LightningModule, configured: Any) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Sorts the return values of ``configure_optimizers``: optimizer, list, pair of lists, dict, list of dicts."""
    name = type(module).__name__
    if isinstance(configured, (list, tuple)) and len(configured) == 2 and isinstance(configured[0], (list, tuple)):
        optimizers, schedulers, monitor = list(configured[0]), configured[1], None
        schedulers = list(schedulers) if isinstance(schedulers, (list, tuple)) else [schedulers]
    elif isinstance(configured, dict):
        optimizers, monitor = [configured.get("optimizer")], configured.get("monitor")
        schedulers = [configured["lr_scheduler"]] if configured.get("lr_scheduler") is not None else []
    elif isinstance(configured, (list, tuple)) and len(configured) == 1:
        return parse_configured(module, configured[0])
    elif isinstance(configured, (list, tuple)):
        dicts = [each for each in configured if isinstance(each, dict)]
        optimizers = [each.get("optimizer") if isinstance(each, dict) else each for each in configured]
        schedulers = [each["lr_scheduler"] for each in dicts if each.get("lr_scheduler") is not None]
        monitor = None
    else:
        optimizers, schedulers, monitor = [configured], [], None
    optimizers = [each.optimizer if isinstance(each, LightningOptimizer) else each for each in optimizers]
    wrong = [each for each in optimizers if not (isinstance(each, Optimizer) and hasattr(each, "param_groups"))]
    if wrong or not optimizers:
        got = type(wrong[0]).__name__ if wrong else "an empty list"
        raise FederatedError(f"Expected `{name}.configure_optimizers` to return a torch optimizer, got {got}.")
    if len(optimizers) > 1 and module.automatic_optimization:
        raise FederatedError(
            f"Expected `{name}.configure_optimizers` to return one optimizer, got {len(optimizers)}: use parameter "
            "groups, or set `automatic_optimization = False` and step them in `training_step`, as under Lightning."
        )
    return optimizers, [_scheduler_config(s, monitor, name, module.automatic_optimization) for s in schedulers]


def _scheduler_config(scheduler: Any, monitor: str | None, name: str, automatic: bool) -> LRSchedulerConfig:
    given = dict(scheduler) if isinstance(scheduler, dict) else {"scheduler": scheduler}
    given.setdefault("monitor", monitor)
    if unknown := sorted(set(given) - _SCHEDULER_KEYS):
        rank_zero_warn(
            f"The schedule of `{name}.configure_optimizers` has unknown keys, which are ignored: {', '.join(unknown)}."
        )
        given = {key: value for key, value in given.items() if key in _SCHEDULER_KEYS}
    if "scheduler" not in given:
        raise FederatedError(
            f"Expected the schedule of `{name}.configure_optimizers` to have the key `scheduler`, "
            f"got {', '.join(sorted(given))}."
        )
    interval = given.setdefault("interval", "epoch")
    if interval not in ("step", "epoch", "round"):
        raise FederatedError(
            f"Expected `interval` of the schedule in `{name}.configure_optimizers` to be step, epoch or round, "
            f"got {interval!r}."
        )
    given.setdefault("reduce_on_plateau", isinstance(given["scheduler"], ReduceLROnPlateau))
    if automatic and given["reduce_on_plateau"] and (given["monitor"] is None or interval == "step"):
        raise FederatedError(
            f"Expected the ReduceLROnPlateau schedule of `{name}.configure_optimizers` to have a `monitor` and the "
            "interval epoch or round."
        )
    return LRSchedulerConfig(**given)


def of_torch(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer is of one of torch's own classes, of which all that it holds is known."""
    return type(optimizer).__module__.startswith("torch.optim")


class FreshOptimizers:
    """What optimizers, and those within them, hold as each client of a round finds it.

    Of torch's own classes these are the objects in their attributes, but for state and groups, which the caller resets.
    Of other classes all is copied, state and groups too, but for parameters and modules. A tensor that was a copy of a
    parameter when they were built, such as a slow weight of Lookahead, becomes a copy of the client's weights.

    Attributes:
        all: The optimizers, and of other classes than torch's also those within them.
        copies: Whether all is copied, as not every class is torch's own.
    """

    def __init__(self, module: LightningModule, optimizers: list[Optimizer]) -> None:
        self._module, self._given = module, optimizers
        self.copies = not all(map(of_torch, optimizers))
        # By this mark schedules know that there was a step.
        self._left = {"_opt_called"} if self.copies else {"_opt_called", "state", "param_groups"}
        self._live: list[tuple[Tensor, Tensor]] = []  # tensors that follow a parameter, each with it
        made = self.take()
        self._noted = self._copies_of_weights(made) if self.copies else []  # the same in what was noted
        self.put_back()

    def take(self) -> list[Tensor]:
        """Notes what they hold now; returns the tensors that were copied."""
        if not self.copies:
            self.all, self._held = self._given, [self._attributes(each) for each in self._given]
            return []
        module = self._module
        kept = (vars(module).get("_trainer"), *module.modules(), *module.parameters(), *module.buffers())
        self._same = {id(each): each for each in kept}
        self.all = self._with_inner()
        self._same.update({id(each): each for each in self.all})
        self._held = [self._attributes(each) for each in self.all]
        self._held, memo = self._copy()
        self._noted = [(memo[id(tensor)], p) for tensor, p in self._live if id(tensor) in memo]
        return [each for key, each in memo.items() if isinstance(each, Tensor) and key not in self._same]

    def put_back(self) -> None:
        """Gives them what they held."""
        held, memo = self._copy() if self.copies else (self._held, {})
        self._live = [(memo[id(tensor)], p) for tensor, p in self._noted]
        for optimizer, values in zip(self.all, held, strict=True):
            for name in filter(self._belongs, vars(optimizer).keys() - values.keys()):
                del vars(optimizer)[name]
            vars(optimizer).update(values)

    def begin(self) -> None:
        """Starts them at the weights that the client has now, in the mode for training where they have two."""
        if not self.copies:
            return
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
        """Returns attributes, but for hooks, which belong to those who registered them."""
        return {k: v for k, v in vars(optimizer).items() if self._belongs(k)}

    def _belongs(self, name: str) -> bool:
        return name not in self._left and not name.endswith("_hooks")

    def _copy(self) -> tuple[list[dict[str, Any]], dict[int, Any]]:
        memo = dict(self._same)
        try:
            return deepcopy(self._held, memo), memo
        except Exception as error:  # whatever an object raises that cannot be copied
            name = type(self._given[0]).__name__
            raise FederatedError(
                f"Expected an optimizer that can be copied, as each client begins with a fresh one, but {name} cannot "
                f"({type(error).__name__}: {error}): choose another in `configure_optimizers` or by `--optimizer`."
            ) from error

    def _with_inner(self) -> list[Optimizer]:
        """Returns the optimizers and those in their attributes, in lists, dicts and objects there, outer ones first."""
        found, seen, todo = list[Optimizer](), set(self._same), list[Any](self._given)
        for each in todo:  # grows meanwhile
            if id(each) in seen or isinstance(each, (Tensor, type)):
                continue
            seen.add(id(each))
            if isinstance(each, Optimizer):
                found.append(each)
            inner = each if isinstance(each, dict) else getattr(each, "__dict__", {})
            todo += each if isinstance(each, (list, tuple)) else inner.values()
        return found

    def _copies_of_weights(self, tensors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Returns those of the tensors, of any dtype, that hold the numbers of a parameter, each with it."""
        parameters = [p for each in self._given for group in each.param_groups for p in group["params"]]
        found = [pair for tensor in tensors if (pair := _with_equal(tensor, parameters))]
        if not any((tensor == tensor.flatten()[0]).all() for tensor, _ in found):
            return found
        # All of one number, it may also be what a sum begins with: this shows when they are built at other weights.
        attributes, values, other = dict(vars(self._module)), [p.detach().clone() for p in parameters], copy(self)
        try:
            for number, p in enumerate(parameters, 1):
                p.data.add_(number)
            with isolated_streams():
                other._given, _ = parse_configured(self._module, self._module.configure_optimizers())
            again = [_with_equal(tensor, parameters) for tensor in other.take()]
        finally:
            for p, value in zip(parameters, values, strict=True):
                p.data.copy_(value)
            vars(self._module).clear()
            vars(self._module).update(attributes)
        return [(tensor, pair[1]) for tensor, pair in zip(tensors, again, strict=False) if pair]


def _with_equal(tensor: Tensor, parameters: list[Tensor]) -> tuple[Tensor, Tensor] | None:
    for p in parameters if tensor.is_floating_point() and tensor.numel() else ():
        if tensor.shape == p.shape and torch.equal(tensor.to(p), p):
            return tensor, p
    return None
