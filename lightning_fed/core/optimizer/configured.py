"""What a module's configure_optimizers returns."""

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_fed.errors import FederatedError

__all__ = ["expect_own_parameters", "parse_configured"]

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
