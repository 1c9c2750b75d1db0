"""Prepares a run before its first batch: Fabric, checks of the module, device, precision and memory layout."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.fx import GraphModule
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_fed.core import is_news
from lightning_fed.core.devices import why_not_mixed, wide_dtype
from lightning_fed.core.user_code import lightning_class, own_uses
from lightning_fed.distributed.strategy import NAME, ClientsStrategy
from lightning_fed.errors import FederatedError, expect_variables
from lightning_fed.trainer.options import TrainerOptions

__all__ = [
    "announce_device", "launch", "lay_out", "make_fabric", "move_to_device", "set_determinism", "show_optimizers",
]  # fmt: skip

# Most processes for each core, and most machines: a larger number is a typing error that would use up memory.
_MOST_PROCESSES, _MOST_NODES = 64, 2**16
_LAUNCHERS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_SLURM = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "32", "64", "bf16", 32, 64)
# Names in user code that suggest that it relies on torch's usual memory order: of weights or outputs of convolutions in
# a module, and also of the flat vector in a callback.
_OF_MODULES = frozenset({
    "view", "view_as", "view_as_real", "view_as_complex", "as_strided", "stride", "is_contiguous", "data_ptr",
    "storage", "untyped_storage", "parameters_to_vector", "vector_to_parameters",
})  # fmt: skip
_OF_CALLBACKS = _OF_MODULES | {"reshape", "reshape_as", "unflatten"}


def make_fabric(given: TrainerOptions) -> Fabric:
    """Builds Fabric for one process, or for several that share a cohort."""
    devices, num_nodes, strategy, precision = given.devices, given.num_nodes, given.strategy, given.precision
    if precision not in _PRECISIONS:
        raise FederatedError(
            f"Expected `--trainer.precision` to be one of {', '.join(map(str, _PRECISIONS[:4]))}, got {precision!r}: "
            "float16 needs a loss scale that would couple the clients, use bf16-mixed instead."
        )
    _expect_sizes(devices, num_nodes)
    started = _started_by_torchrun()
    if devices == "auto":
        devices, num_nodes = started or (1, num_nodes)
    options: dict[str, Any] = {
        "accelerator": given.accelerator, "devices": devices, "num_nodes": num_nodes, "precision": precision
    }  # fmt: skip
    try:
        fabric = Fabric(strategy=strategy, **options)
        if strategy == "auto" and fabric.world_size > 1:
            fabric = Fabric(strategy=NAME, **options)
    except (MisconfigurationException, ValueError, RuntimeError, TypeError) as error:
        expect_variables(*_LAUNCHERS, *_SLURM)
        raise FederatedError(
            f"Expected `--trainer.accelerator`, `devices`, `strategy` and `precision` to fit this machine, but Fabric "
            f"refuses them: {' '.join(str(error).split()).rstrip('.')}."
        ) from error
    if isinstance(mixed := fabric.strategy.precision, MixedPrecision):
        # As in Lightning's trainer: without a cache, weights that change within a step are cast again.
        context = partial(torch.autocast, fabric.device.type, torch.bfloat16, cache_enabled=False)
        mixed.forward_context = context  # type: ignore[method-assign]  # Fabric's plugin has no option for it
    fabric.strategy.remove_checkpoint = partial(_remove_checkpoint, fabric)  # type: ignore[attr-defined]  # as Trainer's has
    if fabric.world_size > 1 and not isinstance(fabric.strategy, ClientsStrategy):
        raise FederatedError(
            f"Expected `--trainer.strategy` to be auto or {NAME} for {fabric.world_size} processes, got {strategy!r}: "
            "the others share gradients or parts of one model, but here each process trains its own clients."
        )
    if isinstance(fabric.strategy, ClientsStrategy):
        fabric.strategy.silence_s = 60.0 * given.tolerance.process_timeout
    return fabric


def _expect_sizes(devices: Any, num_nodes: int) -> None:
    most = _MOST_PROCESSES * (os.cpu_count() or 1)
    if str(devices).isdecimal() and int(devices) > most:
        raise FederatedError(
            f"Expected `--trainer.devices` to be at most {most} on this machine, {_MOST_PROCESSES} for each "
            f"of its cores, got {devices}."
        )
    if num_nodes > _MOST_NODES:
        raise FederatedError(f"Expected `--trainer.num_nodes` to be at most {_MOST_NODES}, got {num_nodes}.")


def _remove_checkpoint(fabric: Fabric, path: str) -> None:
    """Removes a file, for Lightning's checkpoint callbacks, which ask the strategy to."""
    if fabric.is_global_zero:
        Path(path).unlink(missing_ok=True)


def _started_by_torchrun() -> tuple[int, int] | None:
    """Returns how many processes torchrun has started on each node, and on how many nodes."""
    if not TorchElasticEnvironment.detect():
        return None
    expect_variables(*_LAUNCHERS)
    if missing := [name for name in _OF_TORCHRUN if name not in os.environ]:
        raise FederatedError(
            f"Expected the variables of torchrun together, got TORCHELASTIC_RUN_ID without {', '.join(missing)}: unset "
            "it, or start with torchrun."
        )
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    return here, int(os.environ["WORLD_SIZE"]) // max(here, 1)


def launch(fabric: Fabric) -> None:
    """Makes the run's device current; starts its other processes, once, and waits for them."""
    if fabric.world_size == 1:
        fabric.accelerator.setup_device(fabric.device)  # else tensors for a device without number would go to device 0
        return
    if fabric._launched:
        return
    try:
        fabric.launch()
    except FederatedError:
        raise
    except (ValueError, RuntimeError) as error:
        expect_variables(*_LAUNCHERS, *_SLURM)
        raise FederatedError(
            f"Expected to start {fabric.world_size} processes, but Fabric refuses: {' '.join(str(error).split())}; "
            "change `--trainer.devices` or `--trainer.num_nodes`."
        ) from error


def set_determinism(deterministic: Any, benchmark: bool | None = None) -> None:
    """Sets torch's deterministic algorithms and cuDNN's benchmark mode, as Lightning's options do."""
    if benchmark is not None:
        torch.backends.cudnn.benchmark = benchmark
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=deterministic == "warn")
        torch.backends.cudnn.benchmark = False
        # Else torch fills each new tensor with NaN first, to find reads of uninitialised memory; this takes time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property


def announce_device(fabric: Fabric, module: LightningModule) -> None:
    """Sets ``self.device`` for use in ``setup``, before the module is moved, as Lightning does."""
    for part in module.modules():
        if lightning_class(type(part), "_DeviceDtypeModuleMixin") is not None:
            vars(part)["_device"] = fabric.device


def move_to_device(fabric: Fabric, module: LightningModule) -> None:
    """Moves a module to Fabric's device and precision, without wrapping it."""
    if isinstance(fabric.strategy.precision, MixedPrecision) and (why := why_not_mixed(module, fabric.device)):
        raise FederatedError(
            f"Expected {type(module).__name__} to have one precision on {fabric.device}, got bf16-mixed: {why}; set "
            "`--trainer.precision 32-true`."
        )
    fabric.strategy.precision.convert_module(module)
    doubles = any(tensor.dtype == torch.float64 for tensor in (*module.parameters(), *module.buffers()))
    if doubles and wide_dtype(fabric.device) != torch.float64:
        raise FederatedError(
            f"Expected {type(module).__name__} to be in single precision on {fabric.device}, which has no float64: set "
            "`--trainer.precision 32-true`, convert its tensors, or set `--trainer.accelerator cpu`."
        )
    module.to(fabric.device)


def show_optimizers(fabric: Fabric, optimizers: list[Optimizer]) -> None:
    """Puts the optimizers where ``LightningModule.optimizers`` reads them."""
    vars(fabric.strategy).pop("backward", None)  # left by an earlier module that optimized by itself
    fabric.strategy._lightning_optimizers = optimizers  # type: ignore[attr-defined]  # not declared


def lay_out(
    fabric: Fabric,
    module: LightningModule,
    callbacks: Sequence[Callback],
    asked: Literal["auto", "preserve", "channels_last"],
    kept: Literal["preserve", "channels_last"] | None,
) -> Literal["preserve", "channels_last"]:
    """Sets the memory layout of 2-D convolutions and prints why if it chose one; ``kept`` is a resumed run's layout."""
    chosen = kept if asked == "auto" else asked
    if chosen is None:
        chosen, why = _layout(fabric, module, callbacks)
        if why and is_news("memory format", (chosen, why)):
            rank_zero_info(f"Memory format: {chosen}, as {why}.")
    if chosen == "channels_last":
        module.to(memory_format=torch.channels_last)
    return chosen


def _layout(
    fabric: Fabric, module: LightningModule, callbacks: Sequence[Callback]
) -> tuple[Literal["preserve", "channels_last"], str]:
    """Chooses a layout for the run, and gives the reason; without 2-D convolutions no reason is needed."""
    convolutions = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
    if not convolutions or any(map(is_lazy, module.parameters())):
        return "preserve", ""
    if any(p.ndim == 4 and not p.is_contiguous() for p in module.parameters()):
        return "preserve", "the module has a layout of its own"
    if fabric.device.type != "cpu" or str(fabric.strategy.precision.precision) != "32-true":
        return "preserve", "channels_last was found faster on a CPU in single precision"
    if any(max(conv.dilation) > 1 or (conv.stride == conv.kernel_size != (1, 1)) for conv in convolutions):
        return "preserve", "dilated convolutions, and those whose windows do not overlap, are slower in channels_last"
    if made := [p for p in module.modules() if isinstance(p, (ScriptModule, GraphModule))]:
        return "preserve", f"the code of {type(made[0]).__name__}, a part of the module, cannot be read"
    for objects, names in (([module], _OF_MODULES), (callbacks, _OF_CALLBACKS)):
        if found := own_uses(objects, names):
            return "preserve", f"{found[1]} uses `{found[0]}`, which may need torch's usual layout"
    return "channels_last", "the module has 2-D convolutions"
