"""Which engine trains a run's cohorts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_fed.core.optimizer.flat import ELEMENTWISE
from lightning_fed.core.overrides import overrides
from lightning_fed.engines import graphs
from lightning_fed.engines.base import Engine
from lightning_fed.engines.capturable import capture_refusal
from lightning_fed.engines.capture_trial import CaptureTrial
from lightning_fed.engines.captured_step import CapturedStep
from lightning_fed.engines.graphs import CannotCapture
from lightning_fed.engines.local_step import LocalStep, overriding_hooks
from lightning_fed.engines.preflight import StepProbe
from lightning_fed.engines.sequential import SequentialEngine
from lightning_fed.engines.vectorized import VectorizedEngine
from lightning_fed.engines.vectorized.step import CannotStack, first_sentence, refusal
from lightning_fed.errors import FederatedError
from lightning_fed.hooks import FederatedCallback

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
# A chunk larger than this is no faster and only takes memory: what a step costs apart from its clients is paid off.
_LARGEST_CHUNK = 128
# On a GPU a model of up to so many weights leaves most of it idle when it trains alone.
_SMALL_ON_GPU = 10_000_000


def make_engine(trainer: FederatedTrainer, module: LightningModule, *parts: Any) -> Engine:
    """Builds the engine that the trainer's ``engine`` asks for, and notes it in the trainer's ``engine_choice``.

    Args:
        trainer: The trainer, set up for ``fit``.
        module: The resident module.
        *parts: Source, reducer and recorder, see ``Engine``.

    Raises:
        FederatedError: If ``engine`` is ``vectorized`` or ``cuda_graphs`` is set, and the run cannot train this way.
    """
    if trainer.engine == "sequential":
        trainer.engine_choice = _as_asked(trainer, module, parts[0])
    else:
        before = trainer.engine_choice
        choice = trainer.processes.from_first(lambda: _choose(trainer, module, parts[0], before), "engine")
        trainer.engine_choice = choice
        if trainer.engine == "auto" and choice != before:
            how = " with CUDA graphs" if choice.get("cuda_graphs") else ""
            rank_zero_info(f"Engine: {choice['engine']}{how}, as {choice['reason']}.")
    if trainer.engine_choice["engine"] == "vectorized":
        return VectorizedEngine(trainer, module, *parts, chunk_size=trainer.engine_choice["chunk_size"])
    step: LocalStep | None = None
    made = graphs.graphs_for(trainer.vector.device) if trainer.engine_choice.get("cuda_graphs") else None
    if made is not None:
        step = CapturedStep(trainer, module, parts[-1], made, strict=trainer.cuda_graphs)
    return SequentialEngine(trainer, module, *parts, step=step)


def _as_asked(trainer: FederatedTrainer, module: LightningModule, source: Any) -> dict[str, Any]:
    """Returns the sequential engine, with graphs if they are asked for and can be had."""
    if not trainer.cuda_graphs:
        return {"engine": "sequential"}
    try:
        CaptureTrial(trainer, module, source)
    except CannotCapture as reason:
        raise capture_refusal(reason) from reason
    return {"engine": "sequential", "cuda_graphs": True}


def _choose(trainer: FederatedTrainer, module: LightningModule, source: Any, before: dict[str, Any] | None) -> Any:
    """Decides; where the run's former part has measured (``before``) only whether its choice still works."""
    if trainer.engine == "vectorized" and before is not None and before["engine"] != "vectorized":
        before = None  # it was another way then, and this one is asked for now
    if before is not None and before["engine"] == "sequential":
        return _still(trainer, module, source, before) if before.get("cuda_graphs") else before
    probe, draws, refused = None, False, ""
    try:
        _expect_hooks_that_stack(trainer, module)
        probe = StepProbe(trainer, module, source)
        draws = probe.expect_stackable()
        if trainer.compile:
            probe.expect_traceable()
    except CannotStack as reason:
        if trainer.engine == "vectorized":
            raise refusal(reason) from reason
        probe, refused = None, str(reason)
    if before is not None and probe is not None:
        return {**before, "chunk_size": trainer.chunk_size or before["chunk_size"]}
    size = 0 if probe is None else _chunk_size(trainer, probe)
    if probe is not None and trainer.engine == "vectorized":
        return {"engine": "vectorized", "chunk_size": size, "reason": "it was asked for"}
    if trainer.deterministic and probe is not None:
        wins, why = _by_rule(trainer, draws)
        return {"engine": "vectorized" if wins else "sequential", "chunk_size": size, "reason": why}
    trial, why = (None, "") if trainer.deterministic else _tried(trainer, module, source)
    if trial is None and probe is None:
        return {"engine": "sequential", "reason": refused + why}
    try:
        return _by_time(probe, trial, size, draws, refused if probe is None else why)
    except CannotStack as reason:  # of a step that can be traced and not compiled
        if trial is None:
            return {"engine": "sequential", "reason": str(reason)}
        return _by_time(None, trial, size, draws, str(reason))


def _chunk_size(trainer: FederatedTrainer, probe: StepProbe) -> int:
    share = -(-trainer.cohort_size // trainer.processes.size)
    return trainer.chunk_size or max(1, min(share, _LARGEST_CHUNK, probe.lanes_that_fit()))


def _still(trainer: FederatedTrainer, module: LightningModule, source: Any, before: dict[str, Any]) -> dict[str, Any]:
    """Returns the choice of a run's former part for graphs, or that of a step without them if it cannot be had now."""
    trial, why = _tried(trainer, module, source)
    if trial is not None:
        return before
    return {"engine": "sequential", "reason": f"the run before was captured{why or ', and this one is not on a GPU'}"}


def _tried(trainer: FederatedTrainer, module: LightningModule, source: Any) -> tuple[CaptureTrial | None, str]:
    """Captures a step on trial; without success returns None and why, for the end of a sentence."""
    if graphs.graphs_for(trainer.vector.device) is None:
        return None, ""
    try:
        return CaptureTrial(trainer, module, source), ""
    except CannotCapture as reason:
        return None, f"; no CUDA graph, as {reason}"
    except FederatedError as error:  # the run itself will say so
        return None, f"; no CUDA graph ({first_sentence(error)})"


def _by_rule(trainer: FederatedTrainer, draws: bool) -> tuple[bool, str]:
    """Decides without a clock, which would decide otherwise on another day."""
    if draws:
        return False, "the model draws random numbers in training, which would be others for many clients at once"
    if trainer.vector.device.type == "cuda":
        small = trainer.vector.numel <= _SMALL_ON_GPU
        return small, f"the model has {'up to' if small else 'more than'} {_SMALL_ON_GPU:,} weights"
    convolves = any(p.ndim > 2 for p in trainer.vector.parameters)
    return not convolves, f"the model has {'convolutions' if convolves else 'no convolutions'} and trains on a CPU"


def _by_time(
    probe: StepProbe | None, trial: CaptureTrial | None, size: int, draws: bool, without: str
) -> dict[str, Any]:
    """Takes the fastest of what can be had.

    Args:
        probe: Takes the steps of many clients at once, None where they cannot train so.
        trial: Takes captured steps, None where the step cannot be captured.
        size: How many clients would train at once.
        draws: Whether the model draws random numbers in training.
        without: Why one of the two is None.
    """
    timed = probe if probe is not None else trial
    assert timed is not None
    seconds = {"alone": timed.seconds_alone()}
    told = [f"{1e6 * seconds['alone']:.0f} µs alone"]
    if trial is not None:
        seconds["graph"] = trial.seconds_captured()
        told.insert(0, f"{1e6 * seconds['graph']:.0f} µs as a CUDA graph")
    if probe is not None:
        seconds["together"] = probe.seconds_together(size) / size
        told.insert(0, f"{1e6 * seconds['together']:.0f} µs when {size} train at once")
    reason = f"a client's step takes {', '.join(told[:-1])} and {told[-1]}"
    best = min(seconds, key=lambda name: (seconds[name], name == "together"))
    if best == "together" and draws:
        reason += "; the random numbers that the model draws are others than one after another"
    reason += without if probe is not None else f"; many cannot train at once, as {without}"
    choice: dict[str, Any] = {"engine": "vectorized" if best == "together" else "sequential"}
    if best == "graph":
        choice["cuda_graphs"] = True
    return {**choice, **({"chunk_size": size} if probe is not None else {}), "reason": reason}


def _expect_hooks_that_stack(trainer: FederatedTrainer, module: LightningModule) -> None:
    """Refuses what a step of many clients at once has no place for.

    Raises:
        CannotStack: If the module, a callback or an option asks for it.
    """
    for hook in _MODULE_HOOKS:
        if overrides(module, hook):
            raise CannotStack(f"{type(module).__name__} overrides `{hook}`, which is for one client")
    for hook in _CALLBACK_HOOKS:
        for method in overriding_hooks(trainer, hook):
            raise CannotStack(f"{_owner(method)} overrides `{hook}`, which is for one client")
    for hook in ("on_client_start", "on_before_optimizer_step"):
        for method in overriding_hooks(trainer, hook):
            owner = getattr(method, "__self__", None)
            if not (isinstance(owner, FederatedCallback) and owner.stacks):
                raise CannotStack(f"{_owner(method)} overrides `{hook}` without saying `stacks = True`")
    if trainer.accumulate_grad_batches > 1:
        raise CannotStack(f"`--trainer.accumulate_grad_batches` is {trainer.accumulate_grad_batches}")
    assert trainer.local_optimizer is not None
    optimizer = trainer.local_optimizer.optimizer
    if type(optimizer) not in ELEMENTWISE:
        raise CannotStack(f"{type(optimizer).__name__} is not known to step each weight by its own gradient alone")
    if _is_watched(optimizer):
        raise CannotStack(f"{type(optimizer).__name__} has hooks, or another `step`, which are for one client")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise CannotStack(f"{type(optimizer).__name__} is differentiable")


def _is_watched(optimizer: Optimizer) -> bool:
    """Says whether somebody waits for the optimizer's steps; a schedule, which counts them, may."""
    replaced = vars(optimizer).get("step")
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    watched = any((*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))
    return watched or (replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"))


def _owner(method: Any) -> str:
    return type(getattr(method, "__self__", method)).__name__
