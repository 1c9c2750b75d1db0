"""What a run needs before its first batch: Fabric, checks of the module, device and precision."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_fed.errors import FederatedError

__all__ = ["announce_device", "expect_datamodule", "expect_module", "make_fabric", "move_to_device", "set_determinism"]

_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "32", "64", "bf16", 32, 64)


def make_fabric(accelerator: str, devices: Any, num_nodes: int, strategy: str, precision: Any) -> Fabric:
    """Builds Fabric for one process.

    Raises:
        FederatedError: If precision, devices or accelerator cannot be had.
    """
    if precision not in _PRECISIONS:
        raise FederatedError(
            f"Expected `--trainer.precision` to be one of {', '.join(map(str, _PRECISIONS[:4]))}, got {precision!r}: "
            "float16 needs a loss scale that would couple the clients, use bf16-mixed instead."
        )
    try:
        fabric = Fabric(
            accelerator=accelerator,
            devices=1 if devices == "auto" else devices,
            num_nodes=num_nodes,
            strategy=strategy,
            precision=precision,
        )
    except (MisconfigurationException, ValueError, RuntimeError, TypeError) as error:
        raise FederatedError(
            f"Expected `--trainer.accelerator`, `devices`, `strategy` and `precision` to fit this machine, but Fabric "
            f"refuses them: {' '.join(str(error).split())}"
        ) from error
    if fabric.world_size > 1:
        raise FederatedError(
            f"Expected one process, got {fabric.world_size}: the sequential engine trains a cohort in one process, "
            "set `--trainer.devices 1` and `--trainer.num_nodes 1`."
        )
    return fabric


def set_determinism(deterministic: Any) -> None:
    """Asks torch for deterministic algorithms, as Lightning's ``deterministic`` does."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=deterministic == "warn")
        torch.backends.cudnn.benchmark = False


def expect_module(module: Any, step: str) -> None:
    """Checks that a module can run here.

    Args:
        module: What the user gave as the model.
        step: The step it must have, such as ``training_step``.

    Raises:
        FederatedError: If it is no LightningModule, lacks the step, or optimizes by itself.
    """
    name = type(module).__name__
    if not isinstance(module, LightningModule):
        foreign = any(base.__module__.startswith("pytorch_lightning.") for base in type(module).__mro__)
        hint = ": derive it from lightning.pytorch's, not from the package pytorch_lightning's" if foreign else ""
        raise FederatedError(f"Expected `--model` to be a LightningModule, got {name}{hint}.")
    # Lightning's own `predict_step` calls `forward`.
    if not is_overridden(step, module) and not (step == "predict_step" and is_overridden("forward", module)):
        raise FederatedError(f"Expected {name} to define `{step}`: add it, or choose another `--model`.")
    if step != "training_step":
        return
    if not module.automatic_optimization:
        raise FederatedError(
            f"Expected {name} to use automatic optimization, but it sets `automatic_optimization = False`: the local "
            "loop steps the optimizer, so return the loss from `training_step`."
        )
    if not is_overridden("configure_optimizers", module):
        raise FederatedError(f"Expected {name} to define `configure_optimizers`, which clients train with.")


def expect_datamodule(datamodule: Any, federated: bool = False) -> LightningDataModule:
    """Checks what the user gave as the data.

    Args:
        datamodule: What the user gave.
        federated: Whether clients are needed, for ``fit``.

    Raises:
        FederatedError: If it is no datamodule, or has no clients where they are needed.
    """
    if not isinstance(datamodule, LightningDataModule):
        raise FederatedError(f"Expected `--data` to be a LightningDataModule, got {type(datamodule).__name__}.")
    if federated and not hasattr(datamodule, "train_source"):
        raise FederatedError(
            f"Expected `--data` to be a FederatedDataModule, which splits a data set over clients, got "
            f"{type(datamodule).__name__}: give its data sets to lightning_fed.data.FederatedDataModule."
        )
    return datamodule


def announce_device(fabric: Fabric, module: LightningModule) -> None:
    """Lets ``self.device`` name the device in ``setup`` already, before the module is moved, as Lightning does."""
    for part in module.modules():
        if isinstance(part, _DeviceDtypeModuleMixin):
            part._device = fabric.device


def move_to_device(fabric: Fabric, module: LightningModule) -> None:
    """Brings a module to the device and precision of Fabric, without wrapping it."""
    fabric.strategy.precision.convert_module(module)
    module.to(fabric.device)
