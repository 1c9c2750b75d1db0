"""Which engine trains a run's cohorts."""

from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from lightning_utilities.core.rank_zero import rank_zero_debug
from torch.optim import ASGD, Optimizer, Rprop
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_fed.core import is_news
from lightning_fed.core.devices import cudnn_layer, out_of_memory
from lightning_fed.core.hooks import FederatedCallback, HookCaller, is_stock
from lightning_fed.core.optimizer.flat import ELEMENTWISE
from lightning_fed.core.reduction import RoundReducer
from lightning_fed.core.train_state import LocalOptions, TrainState
from lightning_fed.core.user_code import overrides
from lightning_fed.distributed.strategy import processes_of
from lightning_fed.engines.base import Engine
from lightning_fed.engines.client_batches import Phases
from lightning_fed.engines.sequential import SequentialEngine
from lightning_fed.engines.start_gradients import asks_for_full_gradients
from lightning_fed.engines.vectorized import VectorizedEngine
from lightning_fed.engines.vectorized.automatic import LARGEST_CHUNK, AutomaticEngine, expect_worthwhile, own_share
from lightning_fed.engines.vectorized.preflight import StepProbe
from lightning_fed.engines.vectorized.refusals import CannotStack, NotQuicker, cause_of, first_sentence, refusal, unsaid
from lightning_fed.engines.watch import ModuleWatch

__all__ = ["make_engine"]

_MODULE_HOOKS = (
    "backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "on_before_zero_grad",
    "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_start", "on_train_batch_end",
)  # fmt: skip
_CALLBACK_HOOKS = (
    "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_local_step_start", "on_train_batch_start",
    "on_train_batch_end",
)  # fmt: skip


def make_engine(state: TrainState, options: LocalOptions, hooks: HookCaller, reducer: RoundReducer) -> Engine:
    """Builds the engine that ``engine`` asks for, and notes it in the state's ``engine_choice``.

    Raises:
        FederatedError: If ``engine`` is ``vectorized`` and the run cannot train this way, or a parameter was replaced.
    """
    ModuleWatch(state).expect_parameters()  # hooks have been called by now
    choice: dict[str, Any] = {"engine": "sequential"}
    if options.engine != "sequential":
        choice = processes_of(state.fabric).from_first(lambda: _choose(state, options, hooks), "engine")
    if options.engine == "auto":
        line = f"Engine: {choice['engine']}, as {choice['reason']}."
        quiet = choice.pop("quiet", False)
        if is_news("engine", line):
            rank_zero_info(f"Engine: {choice['engine']}." if quiet else line)
        rank_zero_debug(line)
    if "full_gradients" in choice and is_news("full gradients", choice["full_gradients"]):
        rank_zero_info(f"Gradients over a client's full data: {choice['full_gradients']}.")
    state.engine_choice = choice
    if choice["engine"] == "vectorized":
        kind = AutomaticEngine if options.engine == "auto" else VectorizedEngine
        size, stacks = choice["chunk_size"], "full_gradients" not in choice
        engine: Engine = kind(state, options, hooks, reducer, chunk_size=size, stack_full_gradients=stacks)
    else:
        engine = SequentialEngine(state, options, hooks, reducer)
    state.client_states.elsewhere, state.start_gradients = engine.assignment.elsewhere, engine.start_gradients
    return engine


def _choose(state: TrainState, options: LocalOptions, hooks: HookCaller) -> dict[str, Any]:
    """Decides from the run's properties, not from timings, so that the choice is always the same."""
    automatic = options.engine == "auto"
    try:
        _expect_hooks_that_stack(state, options, hooks)
        if automatic:
            expect_worthwhile(state, options, hooks)
        probe = StepProbe(state, options)
        if probe.expect_stackable() and automatic:
            raise CannotStack("the model draws random numbers, which would differ for many clients at once")
        # A resumed run keeps its chunk size: another one would change the random numbers drawn.
        kept = (state.engine_choice or {}).get("chunk_size")
        twice = any(getattr(callback, "takes_second_gradient", False) for callback in hooks.callbacks)
        size = options.chunk_size or kept or min(own_share(state), LARGEST_CHUNK, probe.lanes_that_fit(twice))
        apart = _apart(probe, options, hooks)
    except Exception as error:  # any error of the user's code: it may work for one client at a time
        known = isinstance(error, CannotStack) or out_of_memory(error)
        if automatic:
            why = cause_of(error, 2) if known else f"a trial step of many clients failed ({first_sentence(error)})"
            return {"engine": "sequential", "reason": why, **({"quiet": True} if isinstance(error, NotQuicker) else {})}
        if known:
            raise refusal(error, 2) from error
        raise
    why = "the model is small and its step goes through torch.func.vmap" if automatic else "it was asked for"
    return {"engine": "vectorized", "chunk_size": size, "reason": why, **apart}


def _apart(probe: StepProbe, options: LocalOptions, hooks: HookCaller) -> dict[str, str]:
    """Returns why gradients over clients' full data cannot be taken at once; empty if they can or none are needed."""
    if options.full_gradients.mode == "train" or not any(map(asks_for_full_gradients, hooks.callbacks)):
        return {}
    try:
        probe.expect_stackable(in_eval=True)
    except CannotStack as reason:
        return {"full_gradients": f"one client after another, as in eval mode {reason}"}
    return {}


def _expect_hooks_that_stack(state: TrainState, options: LocalOptions, hooks: HookCaller) -> None:
    """Refuses a run that needs something that a step of many clients at once cannot do.

    Raises:
        CannotStack: If the module, a callback or an option needs it.
    """
    module = state.module
    if not module.automatic_optimization:
        raise CannotStack(f"{type(module).__name__} steps its optimizers by itself")
    if options.compile_mode is not None:
        raise CannotStack("`--trainer.compile` compiles the step of a client that trains alone")
    if module._compiler_ctx is not None:
        raise CannotStack(f"{type(module).__name__} went through `torch.compile` by itself")
    if layer := cudnn_layer(module, state.vector.device):
        raise CannotStack(f"on a GPU cuDNN computes the model's {layer} for one client at a time")
    for callback in hooks.callbacks:
        if is_stock(callback, "BaseFinetuning"):
            raise CannotStack(f"{type(callback).__name__} freezes weights for some rounds, which get no gradient then")
    for hook in _MODULE_HOOKS:
        if overrides(module, hook):
            raise CannotStack(f"{type(module).__name__} overrides `{hook}`, which is for one client")
    for hook in _CALLBACK_HOOKS:
        for method in hooks.methods(hook):
            name = type(getattr(method, "__self__", method)).__name__
            raise CannotStack(f"{name} overrides `{hook}`, which is for one client")
    for hook in ("on_client_start", "on_before_optimizer_step"):
        for method in hooks.methods(hook):
            owner = getattr(method, "__self__", None)
            if not (isinstance(owner, FederatedCallback) and owner.stacks):
                raise unsaid(owner or method, hook)
    if options.tolerance.on_client_error == "skip":
        raise CannotStack("`--trainer.tolerance.on_client_error` is skip, and clients that train at once fail at once")
    if state.optimizer.step_schedulers and Phases(state, options, hooks).by_epochs:
        raise CannotStack("its schedule steps with each local step, and clients turn from head to body at others")
    optimizer = state.optimizer.optimizer
    if type(optimizer) not in ELEMENTWISE:
        raise CannotStack(f"{type(optimizer).__name__} is not known to step each weight by its own gradient alone")
    if _is_watched(optimizer):
        raise CannotStack(f"{type(optimizer).__name__} has hooks, or another `step`, which are for one client")
    if options.changes_rates and isinstance(optimizer, (ASGD, Rprop)):
        name = type(optimizer).__name__
        raise CannotStack(f"the step of {name} is not in proportion to `--trainer.participation.work.lr`")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise CannotStack(f"{type(optimizer).__name__} is differentiable")


def _is_watched(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer has step hooks, or a ``step`` that was replaced other than by a schedule."""
    replaced = vars(optimizer).get("step")
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    watched = any((*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))
    return watched or (replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"))
