"""What a captured local step leaves no place for: it is found before the first round, or as soon as it is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from lightning.pytorch import LightningModule

from lightning_fed.core.overrides import overrides
from lightning_fed.engines.graphs import CannotCapture
from lightning_fed.engines.local_step import overriding_hooks
from lightning_fed.errors import FederatedError

if TYPE_CHECKING:
    from lightning_fed.trainer import FederatedTrainer

__all__ = ["UNREAD", "capture_refusal", "drawn_on_host", "expect_capturable", "guarded", "runs_between_steps"]

_CAPTURED_HOOKS = (
    "backward", "optimizer_zero_grad", "on_before_zero_grad", "on_before_backward", "on_after_backward",
)  # fmt: skip
_STEP_HOOKS = (
    "on_train_batch_start", "on_train_batch_end", "on_local_step_start", "on_before_optimizer_step",
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "configure_gradient_clipping",
    "lr_scheduler_step",
)  # fmt: skip
# What a trainer says that is the same over a whole run.
_CONSTANT = frozenset((
    "accumulate_grad_batches", "datamodule", "default_root_dir", "device_ids", "evaluating",
    "fast_dev_run", "global_rank", "gradient_clip_algorithm", "gradient_clip_val", "is_global_zero", "local_epochs",
    "local_rank", "local_steps", "log_dir", "max_epochs", "max_rounds", "node_rank", "num_devices", "num_nodes",
    "precision", "predicting", "sanity_checking", "seed", "testing", "training", "validating", "world_size",
))  # fmt: skip


def capture_refusal(reason: Exception) -> FederatedError:
    """Says to the user why the local step cannot be captured, and what to change."""
    return FederatedError(
        f"Expected a local step that can be captured for `--trainer.cuda_graphs true`, but {reason}: set "
        "`--trainer.cuda_graphs false`."
    )


def expect_capturable(trainer: FederatedTrainer, module: LightningModule) -> None:
    """Refuses what runs Python within the part of a step that is captured.

    Raises:
        CannotCapture: If the module, a callback, the optimizer, the precision or an option asks for it.
    """
    for hook in _CAPTURED_HOOKS:
        if overrides(module, hook):
            raise CannotCapture(f"{type(module).__name__} overrides `{hook}`, which a graph does not call")
        for method in overriding_hooks(trainer, hook):
            owner = type(getattr(method, "__self__", method)).__name__
            raise CannotCapture(f"{owner} overrides `{hook}`, which a graph does not call")
    if overrides(module, "optimizer_step"):
        raise CannotCapture(f"{type(module).__name__} overrides `optimizer_step`, which takes the gradient by itself")
    if trainer.compile:
        raise CannotCapture("`--trainer.compile true` compiles the step")
    if getattr(trainer.fabric.strategy.precision, "scaler", None) is not None:
        raise CannotCapture("the precision scales the loss, by a factor that the host reads")
    assert trainer.local_optimizer is not None
    if trainer.local_optimizer.needs_closure:
        name = type(trainer.local_optimizer.optimizer).__name__
        raise CannotCapture(f"{name} may take the gradient by itself, by a closure")


def runs_between_steps(trainer: FederatedTrainer, module: LightningModule) -> bool:
    """Says whether code of the user's own runs between a client's steps, which may change what a step reads."""
    places: list[Any] = [module] + ([] if trainer.datamodule is None else [trainer.datamodule])
    owners = [type(getattr(m, "__self__", m)) for hook in _STEP_HOOKS for m in overriding_hooks(trainer, hook)]
    methods = [getattr(place, hook) for place in places for hook in _STEP_HOOKS if hasattr(place, hook)]
    own = [getattr(method, "__func__", method) for method in methods]
    modules = [str(code.__module__) for code in (*owners, *own)]
    return any(name.split(".")[0] not in ("lightning", "lightning_fed") for name in modules)


def drawn_on_host(before: tuple[bytes, ...], after: tuple[bytes, ...], device: torch.device) -> str | None:
    """Names a random stream of the host that has been drawn from: a graph would have the same numbers for ever.

    Args:
        before: ``random_states`` before a step.
        after: The same after it.
        device: Where the step runs; torch's stream of the CPU is that of a step that runs there.
    """
    names = ("torch's", "NumPy's", "Python's")
    for name, one, other in zip(names, before, after, strict=False):
        if one != other and not (name == "torch's" and device.type == "cpu"):
            return name
    return None


class _Unread:
    """Stands for the number of a batch: it may be passed on, but not read."""


def _refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise CannotCapture("`training_step` reads `batch_idx`, which a graph would keep for ever")


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow",
    "rpow", "and", "rand", "or", "ror", "xor", "rxor", "lshift", "rlshift", "rshift", "rrshift", "neg", "pos", "abs",
    "eq", "ne", "lt", "le", "gt", "ge", "hash", "bool", "int", "float", "index", "str", "repr", "format", "round",
    "complex", "divmod", "rdivmod", "invert", "getattr",
):  # fmt: skip
    setattr(_Unread, f"__{_name}__", _refuse)

UNREAD: Any = _Unread()


class _Guard:
    """Stands for the trainer while a step is captured: what changes within a run cannot be read from it."""

    def __init__(self, trainer: FederatedTrainer) -> None:
        vars(self)["_of"] = trainer

    def __getattr__(self, name: str) -> Any:
        if name in _CONSTANT:
            return getattr(vars(self)["_of"], name)
        read = {"round": "the round", "current_epoch": "the round", "client": "`trainer.client`"}.get(name)
        raise CannotCapture(
            f"`training_step` reads {read or f'`trainer.{name}`'}, which a graph would keep as it was when captured"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise CannotCapture(f"`training_step` sets `trainer.{name}`, which a graph does not do again")


@contextmanager
def guarded(module: LightningModule, trainer: FederatedTrainer) -> Iterator[None]:
    """Lets a module, and the LightningModules inside it, read of the trainer only what stays the same over a run."""
    parts = [part for part in module.modules() if isinstance(part, LightningModule)]
    before = [vars(part)["_trainer"] for part in parts]
    for part in parts:
        vars(part)["_trainer"] = _Guard(trainer)
    try:
        yield
    finally:
        for part, former in zip(parts, before, strict=True):
            vars(part)["_trainer"] = former
