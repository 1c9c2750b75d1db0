"""Which engine trains a run's cohorts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torchmetrics import Metric

from lightning_fed.engines.base import Engine
from lightning_fed.engines.lane_batches import LaneBatches
from lightning_fed.engines.local_step import overriding_hooks
from lightning_fed.engines.sequential import SequentialEngine
from lightning_fed.engines.stacked_optimizer import ELEMENTWISE
from lightning_fed.engines.stacked_step import CannotStack, StackedStep
from lightning_fed.engines.vectorized import VectorizedEngine
from lightning_fed.errors import FederatedError
from lightning_fed.hooks import Client, FederatedCallback
from lightning_fed.metrics import metric_states
from lightning_fed.transfer import overrides

if TYPE_CHECKING:
    from lightning_fed.trainer import FederatedTrainer

__all__ = ["make_engine"]

_MODULE_HOOKS = (
    "backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "on_before_zero_grad",
    "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_start", "on_train_batch_end",
)  # fmt: skip
_CALLBACK_HOOKS = (
    "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_local_step_start", "on_train_batch_start",
    "on_train_batch_end",
)  # fmt: skip


def make_engine(trainer: FederatedTrainer, module: LightningModule, *parts: Any) -> Engine:
    """Builds the engine that the trainer's ``engine`` asks for.

    Args:
        trainer: The trainer, set up for ``fit``.
        module: The resident module.
        *parts: Source, reducer and recorder, see ``Engine``.

    Raises:
        FederatedError: If ``engine`` is ``vectorized`` and the model or the run cannot train this way.
    """
    if trainer.engine == "sequential":
        return SequentialEngine(trainer, module, *parts)
    try:
        expect_stackable(trainer, module)
        try_step(trainer, module, parts[0])
    except CannotStack as reason:
        if trainer.engine == "vectorized":
            raise FederatedError(
                f"Expected a run that can train many clients at once for `--trainer.engine vectorized`, but {reason}: "
                "set `--trainer.engine sequential`."
            ) from reason
        rank_zero_info(f"Clients train one after another, as {reason}.")
        return SequentialEngine(trainer, module, *parts)
    return VectorizedEngine(trainer, module, *parts, chunk_size=trainer.chunk_size or trainer.cohort_size)


def expect_stackable(trainer: FederatedTrainer, module: LightningModule) -> None:
    """Refuses what a step of many clients at once has no place for.

    Raises:
        CannotStack: If the module, a callback or an option asks for it.
    """
    name = type(module).__name__
    for hook in _MODULE_HOOKS:
        if overrides(module, hook):
            raise CannotStack(f"{name} overrides `{hook}`, which is for one client")
    for hook in _CALLBACK_HOOKS:
        if methods := overriding_hooks(trainer, hook):
            owner = getattr(methods[0], "__self__", methods[0])
            raise CannotStack(f"{type(owner).__name__} overrides `{hook}`, which is for one client")
    for hook in ("on_client_start", "on_before_optimizer_step"):
        for method in overriding_hooks(trainer, hook):
            owner = getattr(method, "__self__", None)
            if not (isinstance(owner, FederatedCallback) and owner.stacks):
                raise CannotStack(f"{type(owner).__name__} overrides `{hook}` without saying `stacks = True`")
    if trainer.accumulate_grad_batches > 1:
        raise CannotStack(f"accumulate_grad_batches is {trainer.accumulate_grad_batches}")
    assert trainer.local_optimizer is not None
    optimizer = trainer.local_optimizer.optimizer
    if type(optimizer) not in ELEMENTWISE:
        raise CannotStack(f"{type(optimizer).__name__} is not known to step each weight by its own gradient alone")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise CannotStack(f"{type(optimizer).__name__} is differentiable")


def try_step(trainer: FederatedTrainer, module: LightningModule, source: Any) -> None:
    """Takes the gradients of two clients on their first batches, and puts everything back.

    Raises:
        CannotStack: If that fails.
    """
    sizes = source.sizes
    clients = tuple(Client(int(i), int(sizes[i]), 1) for i in sizes.argsort(kind="stable")[::-1][:2] if sizes[i])
    step = StackedStep(trainer, module)
    metrics, counts = metric_states(module.modules()), _update_counts(module)
    with isolate_rng():
        from lightning_fed.transfer import batch_transfer

        transfer = batch_transfer(trainer.fabric, module, trainer.datamodule, resident=True)
        batches = LaneBatches(trainer, source, transfer, clients, by_index=False)
        try:
            for run in batches.runs(0):
                count = run.lanes.stop - run.lanes.start
                weights = trainer.vector.data.expand(count, -1).clone()
                live = trainer.buffers.live.tensors()
                buffers = {name: b.unsqueeze(0).repeat(count, *[1] * b.ndim) for name, b in live.items()}
                gradients, _, _ = step(weights, buffers, run.batch, run.batch_idx, run.size)
        except CannotStack:
            raise
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise CannotStack(f"{type(module).__name__} does not go through torch.func.vmap ({lines[0]})") from error
        finally:
            changed = _update_counts(module) != counts
            for metric, state in metrics:
                vars(metric).update(state)
    if changed:
        raise CannotStack("it updates torchmetrics objects in `training_step`, whose state vmap cannot keep apart")


def _update_counts(module: LightningModule) -> list[int]:
    return [metric._update_count for metric in module.modules() if isinstance(metric, Metric)]
