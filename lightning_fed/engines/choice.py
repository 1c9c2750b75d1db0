"""Which engine trains a run's cohorts."""

from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import ASGD, Optimizer, Rprop
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torchmetrics import Metric

from lightning_fed.core.optimizer.flat import ELEMENTWISE
from lightning_fed.core.overrides import overrides
from lightning_fed.core.reduction import RoundReducer
from lightning_fed.core.train_state import LocalOptions, TrainState
from lightning_fed.data import TensorSource
from lightning_fed.distributed.strategy import processes_of
from lightning_fed.engines.automatic import AutomaticEngine
from lightning_fed.engines.base import Engine
from lightning_fed.engines.client_batches import samples_in_epoch
from lightning_fed.engines.preflight import StepProbe
from lightning_fed.engines.sequential import SequentialEngine
from lightning_fed.engines.start_gradients import asks_for_full_gradients
from lightning_fed.engines.vectorized import VectorizedEngine
from lightning_fed.engines.vectorized.own_code import OwnCode, is_own
from lightning_fed.engines.vectorized.step import CannotStack, first_sentence, refusal
from lightning_fed.engines.watch import ModuleWatch
from lightning_fed.hooks import FederatedCallback, HookCaller, is_stock

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
# What was measured (docs/engines.md): the step of a larger model or batch is long enough to be worth taking alone, and
# where fewer clients share a call of it, nothing is won.
_MOST_WEIGHTS = {"cpu": 2**17, "cuda": 10_000_000}
_FEWEST_LANES, _LARGEST_BATCH = 8, 300
# Layers of torch whose step is quicker for many clients at once on a CPU: these, and those without parameters from
# these files of torch.nn.modules.
_QUICK = (
    nn.Linear, nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.PReLU,
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict,
)  # fmt: skip
_QUICK_FILES = ("activation", "loss", "flatten", "dropout", "linear", "distance")
# What a training step calls, and what in it is seen from outside, or is of one client.
_STEP = ("training_step", "forward", "__call__", "__getattr__", "__getattribute__", "__setattr__")
_SEEN_OUTSIDE = frozenset({
    "print", "input", "open", "exec", "eval", "write", "writelines", "write_text", "write_bytes", "save", "savez",
    "trainer", "_trainer", "fabric", "logger", "loggers", "optimizers", "lr_schedulers", "setattr", "__dict__", "vars",
    "globals",
})  # fmt: skip


def make_engine(state: TrainState, options: LocalOptions, hooks: HookCaller, reducer: RoundReducer) -> Engine:
    """Builds the engine that ``engine`` asks for, and notes it in the state's ``engine_choice``.

    Args:
        state: What ``fit`` works on; its ``engine_choice`` is that of the checkpoint that a run goes on from, if any.
        options: How clients train.
        hooks: Calls the hooks of all callbacks.
        reducer: See ``Engine``.

    Raises:
        FederatedError: If ``engine`` is ``vectorized`` and the run cannot train this way, or a parameter was replaced.
    """
    ModuleWatch(state).expect_parameters()  # hooks have been called by now
    choice: dict[str, Any] = {"engine": "sequential"}
    if options.engine != "sequential":
        choice = processes_of(state.fabric).from_first(lambda: _choose(state, options, hooks), "engine")
    if options.engine == "auto":
        rank_zero_info(f"Engine: {choice['engine']}, as {choice['reason']}.")
    if "full_gradients" in choice:
        rank_zero_info(f"Gradients over a client's full data: {choice['full_gradients']}.")
    state.engine_choice = choice
    if choice["engine"] == "vectorized":
        kind = AutomaticEngine if options.engine == "auto" else VectorizedEngine
        size, stacks = choice["chunk_size"], "full_gradients" not in choice
        return kind(state, options, hooks, reducer, chunk_size=size, stack_full_gradients=stacks)
    return SequentialEngine(state, options, hooks, reducer)


def _choose(state: TrainState, options: LocalOptions, hooks: HookCaller) -> dict[str, Any]:
    """Decides by what the run is, without a clock, which would decide otherwise on another day."""
    automatic = options.engine == "auto"
    try:
        _expect_hooks_that_stack(state, options, hooks)
        if automatic:
            _expect_to_pay(state, options)
            _expect_to_be_the_same(state, options, hooks)
        probe = StepProbe(state, options)
        draws = probe.expect_stackable(unasked=automatic)
        if automatic and draws:
            raise CannotStack("the model draws random numbers, which would be others for many clients at once")
        size = options.chunk_size or min(_share(state), _LARGEST_CHUNK, probe.lanes_that_fit(unasked=automatic))
        if automatic and state.engine_choice is None and size < _FEWEST_LANES:
            raise CannotStack(f"there is room for {size} clients at once, and it pays from {_FEWEST_LANES} on")
        if options.compile_mode is not None:
            probe.expect_compilable(options.compile_mode, by_tracing=not automatic)
        apart = _apart(probe, options, hooks)
    except CannotStack as reason:
        if automatic:
            return {"engine": "sequential", "reason": str(reason)}
        raise refusal(reason) from reason
    except Exception as error:  # whatever the user's code raises: trained one after another it may do well
        if automatic:
            why = f"many clients at once could not be tried ({first_sentence(error)})"
            return {"engine": "sequential", "reason": why}
        raise
    why = "the model is small and its step goes through torch.func.vmap" if automatic else "it was asked for"
    return {"engine": "vectorized", "chunk_size": size, "reason": why, **apart}


def _apart(probe: StepProbe, options: LocalOptions, hooks: HookCaller) -> dict[str, str]:
    """Says why gradients over a client's full data cannot be taken at once, if any are; nothing if they can."""
    if options.full_gradient_mode == "train" or not any(map(asks_for_full_gradients, hooks.callbacks)):
        return {}
    try:
        probe.expect_stackable(in_eval=True)
    except CannotStack as reason:
        return {"full_gradients": f"one client after another, as in eval mode {reason}"}
    return {}


def _share(state: TrainState) -> int:
    """Clients of a round that one process trains."""
    return -(-state.cohort_size // processes_of(state.fabric).size)


def _expect_to_pay(state: TrainState, options: LocalOptions) -> None:
    """Refuses what was not found to be quicker for many clients at once; a run that goes on has been through this.

    Raises:
        CannotStack: If the device, the model, or what its clients do is such.
    """
    device, kept = state.vector.device.type, state.engine_choice
    if kept is not None:
        if kept["engine"] != "vectorized":
            raise CannotStack("the run has trained so until now")
        return
    most = _MOST_WEIGHTS.get(device)
    if most is None:
        raise CannotStack(f"many clients at once have not been measured on {device}")
    if state.vector.numel > most:
        raise CannotStack(f"the model has more than {most:,} weights")
    slow = next((part for part in state.module.modules() if not _is_quick(part)), None)
    if device == "cpu" and slow is not None:
        raise CannotStack(f"{type(slow).__name__} is not known to be quicker for many clients at once on a CPU")
    if (batch := min(state.source.batch_size, int(np.max(state.source.sizes)))) > _LARGEST_BATCH:
        raise CannotStack(f"a step on {batch:,} samples is long enough to be taken alone")
    if (lanes := _lanes_of_a_call(state, options)) < _FEWEST_LANES:
        raise CannotStack(f"only {lanes:.1f} clients on average would share a step, which pays from {_FEWEST_LANES} on")


def _is_quick(part: nn.Module) -> bool:
    """Says whether a part is a layer that is quicker for many clients, or one of the user's own, of matrices."""
    kind = next(kind for kind in type(part).__mro__ if kind.__module__.startswith("torch.nn."))
    own = [p for p in part._parameters.values() if p is not None]
    if kind is nn.Module or isinstance(part, Metric):
        return all(p.ndim <= 2 for p in own)
    return isinstance(part, _QUICK) or (not own and kind.__module__.rpartition(".")[2] in _QUICK_FILES)


def _lanes_of_a_call(state: TrainState, options: LocalOptions) -> float:
    """Estimates how many clients share a call of the step: batches of one size, at the same step, of one chunk.

    Of a cohort whose clients are spread evenly over the sizes that there are.
    """
    source = state.source
    sizes = samples_in_epoch(source, np.asarray(source.sizes))
    sizes = sizes[sizes > 0]
    count = min(_share(state), options.chunk_size or _LARGEST_CHUNK)
    cohort = np.quantile(sizes, np.linspace(0, 1, count), method="nearest")
    most = options.local_steps or int(cohort.max())
    full = np.minimum(cohort // source.batch_size, most)
    rest = cohort[(cohort % source.batch_size > 0) & (full < most)]
    return float((full.sum() + len(rest)) / (full.max() + len(np.unique(rest))))


def _expect_to_be_the_same(state: TrainState, options: LocalOptions, hooks: HookCaller) -> None:
    """Refuses what need not give the results of one client after another, whatever the step computes.

    Raises:
        CannotStack: If the data, the module or a callback is such.
    """
    module, name = state.module, type(state.module).__name__
    if not (type(state.source) is TensorSource and state.transfer is None):
        raise CannotStack("samples are read or changed one by one, which takes longer than the step of a small model")
    if torch.is_anomaly_enabled():
        raise CannotStack("`--trainer.detect_anomaly` looks for the operation of one client")
    for hook in ("on_client_end", "on_client_entered"):
        for method in hooks.methods(hook):
            owner = getattr(method, "__self__", method)
            if is_own(type(owner)) and not getattr(owner, "stacks", False):
                raise CannotStack(f"{_owner(method)} overrides `{hook}` without saying `stacks = True`")
    if not all(parameter.requires_grad for parameter in module.parameters()):
        raise CannotStack(f"{name} has frozen parameters, which training may move for all clients")
    for part in module.modules():
        if any((part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)):
            raise CannotStack(f"{type(part).__name__} has hooks on its passes, which are for one client")
    hooked = [(p._backward_hooks, p._post_accumulate_grad_hooks) for p in module.parameters()]
    if any(before or len(after or ()) > 1 for before, after in hooked):  # one is of the flat vector
        raise CannotStack(f"a parameter of {name} has hooks on its gradient, which are for one client")
    code = OwnCode([module], _STEP)
    metrics = [path.partition(".")[0] for path, part in module.named_modules() if isinstance(part, Metric)]
    if seen := code.uses({*_SEEN_OUTSIDE, *metrics}):
        raise CannotStack(f"{seen[1]} uses `{seen[0]}`, which is for one client at a time")
    for used, where in {**code.changes, **code.shared, **code.unknown}.items():
        raise CannotStack(f"{where} uses `{used}`, which it may change for other clients too")


def _expect_hooks_that_stack(state: TrainState, options: LocalOptions, hooks: HookCaller) -> None:
    """Refuses what a step of many clients at once has no place for.

    Raises:
        CannotStack: If the module, a callback or an option asks for it.
    """
    module = state.module
    if not module.automatic_optimization:
        raise CannotStack(f"{type(module).__name__} steps its optimizers by itself")
    if module._compiler_ctx is not None:
        raise CannotStack(f"{type(module).__name__} went through `torch.compile` by itself")
    for callback in hooks.callbacks:
        if is_stock(callback, "BaseFinetuning"):
            raise CannotStack(f"{type(callback).__name__} freezes weights for some rounds, which get no gradient then")
    for hook in _MODULE_HOOKS:
        if overrides(module, hook):
            raise CannotStack(f"{type(module).__name__} overrides `{hook}`, which is for one client")
    for hook in _CALLBACK_HOOKS:
        for method in hooks.methods(hook):
            raise CannotStack(f"{_owner(method)} overrides `{hook}`, which is for one client")
    for hook in ("on_client_start", "on_before_optimizer_step"):
        for method in hooks.methods(hook):
            owner = getattr(method, "__self__", None)
            if not (isinstance(owner, FederatedCallback) and owner.stacks):
                raise CannotStack(f"{_owner(method)} overrides `{hook}` without saying `stacks = True`")
    if options.on_client_error == "skip":
        raise CannotStack("`--trainer.on_client_error` is skip, and clients that train at once also fail at once")
    optimizer = state.optimizer.optimizer
    if type(optimizer) not in ELEMENTWISE:
        raise CannotStack(f"{type(optimizer).__name__} is not known to step each weight by its own gradient alone")
    if _is_watched(optimizer):
        raise CannotStack(f"{type(optimizer).__name__} has hooks, or another `step`, which are for one client")
    if options.changes_rates and isinstance(optimizer, (ASGD, Rprop)):
        raise CannotStack(f"the step of {type(optimizer).__name__} is not in proportion to `--trainer.work.lr`")
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
