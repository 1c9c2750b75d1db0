"""What a run needs before its first batch: Fabric, checks of the module, device and precision."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_fed.errors import FederatedError
from lightning_fed.processes import Processes
from lightning_fed.strategy import NAME, ClientsStrategy

__all__ = [
    "announce_device",
    "expect_datamodule",
    "expect_module",
    "expect_same_data",
    "launch",
    "make_fabric",
    "move_to_device",
    "set_determinism",
    "share_model",
]

_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "32", "64", "bf16", 32, 64)


def make_fabric(accelerator: str, devices: Any, num_nodes: int, strategy: str, precision: Any) -> Fabric:
    """Builds Fabric for one process, or for several that share a cohort.

    Raises:
        FederatedError: If precision, devices, accelerator or strategy cannot be had.
    """
    if precision not in _PRECISIONS:
        raise FederatedError(
            f"Expected `--trainer.precision` to be one of {', '.join(map(str, _PRECISIONS[:4]))}, got {precision!r}: "
            "float16 needs a loss scale that would couple the clients, use bf16-mixed instead."
        )
    if devices == "auto":
        devices, num_nodes = _started_by_torchrun() or (1, num_nodes)
    options: dict[str, Any] = {
        "accelerator": accelerator, "devices": devices, "num_nodes": num_nodes, "precision": precision
    }  # fmt: skip
    try:
        fabric = Fabric(strategy=strategy, **options)
        if strategy == "auto" and fabric.world_size > 1:
            fabric = Fabric(strategy=NAME, **options)
    except (MisconfigurationException, ValueError, RuntimeError, TypeError) as error:
        raise FederatedError(
            f"Expected `--trainer.accelerator`, `devices`, `strategy` and `precision` to fit this machine, but Fabric "
            f"refuses them: {' '.join(str(error).split())}"
        ) from error
    if fabric.world_size > 1 and not isinstance(fabric.strategy, ClientsStrategy):
        raise FederatedError(
            f"Expected `--trainer.strategy` to be auto or {NAME} for {fabric.world_size} processes, got {strategy!r}: "
            "others share gradients or parts of one model, but each process trains clients of its own."
        )
    return fabric


def _started_by_torchrun() -> tuple[int, int] | None:
    """Returns how many processes torchrun has started on each node, and on how many nodes."""
    if not TorchElasticEnvironment.detect():
        return None
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    return here, int(os.environ["WORLD_SIZE"]) // here


def launch(fabric: Fabric) -> None:
    """Starts the run's other processes, once, and waits for them.

    Raises:
        FederatedError: If the launcher that started this process has started another number.
    """
    if fabric.world_size == 1 or fabric._launched:
        return
    try:
        fabric.launch()
    except (ValueError, RuntimeError) as error:
        raise FederatedError(
            f"Expected to start {fabric.world_size} processes, but Fabric refuses: {' '.join(str(error).split())}; "
            "change `--trainer.devices` or `--trainer.num_nodes`."
        ) from error


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


def expect_same_data(processes: Processes, seed: int, sizes: Any, split_hash: str | None) -> None:
    """Checks that all processes have made the same clients.

    Raises:
        FederatedError: If they have not.
    """
    facts = (seed, hashlib.sha256(np.asarray(sizes).tobytes()).hexdigest(), split_hash)
    if len(set(processes.exchange(facts, "data"))) > 1:
        raise FederatedError(
            "Expected every process to make the same clients of the same data, but the splits differ: each process "
            "runs the whole script, so seed what it draws (`--seed_everything`, `seed_everything` at its top), or set "
            "`--trainer.devices 1`."
        )


@torch.no_grad()
def share_model(processes: Processes, module: LightningModule) -> None:
    """Gives all processes the parameters and buffers of the first one's module."""
    if processes.size > 1:
        tensors = [*module.parameters(), *module.buffers()]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if any(other != shapes for other in processes.exchange(shapes, "model")):
            raise FederatedError(
                "Expected every process to build the same model, but their parameters differ in shape: `--model` must "
                "not depend on the rank; or set `--trainer.devices 1`."
            )
        processes.broadcast(*tensors)


def announce_device(fabric: Fabric, module: LightningModule) -> None:
    """Lets ``self.device`` name the device in ``setup`` already, before the module is moved, as Lightning does."""
    for part in module.modules():
        if isinstance(part, _DeviceDtypeModuleMixin):
            part._device = fabric.device


def move_to_device(fabric: Fabric, module: LightningModule) -> None:
    """Brings a module to the device and precision of Fabric, without wrapping it."""
    fabric.strategy.precision.convert_module(module)
    module.to(fabric.device)
