"""What the user's code overrides of Lightning's, and the transfer of a batch through the hooks among it."""

from collections.abc import Callable
from inspect import signature
from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.plugins import Precision
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

__all__ = ["accepts", "batch_transfer", "lightning_class", "overrides", "requires"]

# The package `lightning` holds what is published as `pytorch_lightning` and `lightning_fabric` too.
_PACKAGES = ("lightning.pytorch.", "lightning.fabric.", "pytorch_lightning.", "lightning_fabric.")
_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def lightning_class(kind: Any, name: str) -> Any:
    """Returns the class of Lightning's own, of whichever package, that a class derives from.

    Args:
        kind: A class.
        name: Lightning's class, such as ``LightningModule``.

    Returns:
        That class; None if ``kind`` is no such thing.
    """
    found = (base for base in kind.__mro__ if base.__name__ == name and base.__module__.startswith(_PACKAGES))
    return next(found, None)


def overrides(part: Any, hook: str) -> bool:
    """Says whether the user's LightningModule or LightningDataModule overrides a hook."""
    kind = type(part)
    parent = lightning_class(kind, "LightningModule") or lightning_class(kind, "LightningDataModule")
    return bool(is_overridden(hook, part, parent))


def accepts(function: Callable[..., Any], name: str, at_least: int) -> bool:
    """Says whether a step function takes an argument, by name or as one of ``at_least`` positional ones."""
    parameters = signature(function).parameters.values()
    if any(p.name == name or p.kind == p.VAR_POSITIONAL for p in parameters):
        return True
    return len(list(parameters)) >= at_least


def requires(function: Callable[..., Any], name: str) -> bool:
    """Says whether a step function has an argument of a name without a default."""
    parameter = signature(function).parameters.get(name)
    return parameter is not None and parameter.default is parameter.empty


def batch_transfer(
    fabric: Fabric, module: LightningModule, datamodule: LightningDataModule | None, resident: bool
) -> Callable[[Any, int], Any] | None:
    """Builds the function that brings a batch to device and precision.

    Args:
        fabric: Gives device and precision.
        module: May override Lightning's batch transfer hooks.
        datamodule: May override them too, and then takes precedence, as in Lightning.
        resident: Whether batches are on the device already.

    Returns:
        A function of (batch, dataloader index), None when there is nothing to do.
    """
    stages = []
    for hook in _HOOKS:
        owner: Any = None
        if datamodule is not None and overrides(datamodule, hook):
            owner = datamodule
        elif overrides(module, hook):
            owner = module
        if owner is not None:
            stages.append(_bind(getattr(owner, hook), fabric, hook))
        elif hook == "transfer_batch_to_device" and not resident:
            stages.append(lambda batch, _: fabric.to_device(batch))
    convert = fabric.strategy.precision.convert_input
    if type(fabric.strategy.precision).convert_input is not Precision.convert_input:
        stages.append(lambda batch, _: convert(batch))
    if not stages:
        return None

    def transfer(batch: Any, dataloader_idx: int) -> Any:
        for stage in stages:
            batch = stage(batch, dataloader_idx)
        return batch

    return transfer


def _bind(method: Callable[..., Any], fabric: Fabric, hook: str) -> Callable[[Any, int], Any]:
    if hook == "transfer_batch_to_device":
        return lambda batch, idx: method(batch, fabric.device, idx)
    return method
