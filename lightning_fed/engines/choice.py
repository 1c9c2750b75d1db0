"""Which way a run's cohorts are trained. For ``engine: auto`` modules are asked, tried and watched, in this order.

Asked: does everything that the run has say that it works for many clients at once, and would that be quicker? Tried: do
two clients at once get the gradients of one alone, and leave no trace in what they share? Watched: do the steps of each
chunk leave none either? At the first no clients train one after another; a chunk that failed is trained again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from lightning_utilities.core.rank_zero import rank_zero_debug
from torch import nn
from torch.optim import ASGD, Optimizer, Rprop
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_fed.client_algorithms import LossAlgorithm
from lightning_fed.core import is_news
from lightning_fed.core.devices import cudnn_layer, out_of_memory
from lightning_fed.core.hooks import FederatedCallback, HookCaller, is_stock
from lightning_fed.core.optimizer.flat import ELEMENTWISE
from lightning_fed.core.reduction import RoundReducer
from lightning_fed.core.seeding import Purpose, seed_everywhere, seed_for
from lightning_fed.core.train_state import LocalOptions, TrainState
from lightning_fed.core.updates import Client
from lightning_fed.core.user_code import is_own, overrides, own_places
from lightning_fed.distributed.strategy import processes_of
from lightning_fed.engines.base import ClientTrainer, Engine, FinishedClient, TrainingParts
from lightning_fed.engines.client_batches import Phases, samples_in_epoch
from lightning_fed.engines.fleet import Fleet, RemoteTrainer, SumsTrainer
from lightning_fed.engines.sequential import SequentialTrainer
from lightning_fed.engines.start_gradients import asks_for_full_gradients
from lightning_fed.engines.trial import Attributes, random_states
from lightning_fed.engines.vectorized import VectorizedTrainer
from lightning_fed.engines.vectorized.batches import gathers
from lightning_fed.engines.vectorized.preflight import StepProbe
from lightning_fed.engines.vectorized.refusals import FEWEST_LANES, CannotStack, attempt, cause_of, refusal, tell
from lightning_fed.engines.watch import ModuleWatch

__all__ = ["AutomaticTrainer", "make_engine"]

# A larger chunk is no faster and only takes memory: the fixed cost of a step is already small for each client.
LARGEST_CHUNK = 128
# Measured limits (docs/engines.md): with a larger model or batch, a step is so long that sharing it gains nothing.
_MOST_WEIGHTS, _LARGEST_BATCH = {"cpu": 2**17, "cuda": 10_000_000}, 300  # of single precision
# Layers of torch with weights whose step was measured to be quicker for many clients at once, on a CPU.
_QUICK = (
    nn.Linear, nn.Bilinear, nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.PReLU,
    nn.ModuleList, nn.ParameterList, nn.ParameterDict,
)  # fmt: skip
_MODULE_HOOKS = (
    "backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "on_before_zero_grad",
    "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_start", "on_train_batch_end",
)  # fmt: skip
_CALLBACK_HOOKS = (
    "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_local_step_start", "on_train_batch_start",
    "on_train_batch_end",
)  # fmt: skip


_Reasons: TypeAlias = Iterator[tuple[Any, str]]


class NotQuicker(CannotStack):
    """Says that a run would be no faster with many clients at once; the user has nothing to change."""


def make_engine(
    state: TrainState, options: LocalOptions, hooks: HookCaller, reducer: RoundReducer, fleet: Fleet | None = None
) -> Engine:
    """Builds the engine that ``engine`` asks for, and notes it in the state's ``engine_choice``.

    With a fleet, each of its nodes has an engine of its own, and the one here adds up what they send.

    Raises:
        FederatedError: If ``engine`` is ``vectorized`` and the run cannot train this way, or a parameter was replaced.
    """
    ModuleWatch(state).expect_parameters()  # hooks have been called by now
    choice: dict[str, Any] = {"engine": "sequential"}
    if fleet is not None:
        choice["reason"] = "the nodes of a fleet train the clients"
    elif options.engine != "sequential":
        choice = processes_of(state.fabric).from_first(lambda: _choose(state, options, hooks), "engine")
    if options.engine == "auto" and fleet is None:
        line = f"Engine: {choice['engine']}, as {choice['reason']}."
        quiet = choice.pop("quiet", False)
        if is_news("engine", line):
            rank_zero_info(f"Engine: {choice['engine']}." if quiet else line)
        rank_zero_debug(line)
    if "full_gradients" in choice and is_news("full gradients", choice["full_gradients"]):
        rank_zero_info(f"Gradients over a client's full data: {choice['full_gradients']}.")
    state.engine_choice = choice
    parts = TrainingParts(state, options, hooks)
    if fleet is None:
        return Engine(parts, _trainer_for(parts, choice), reducer)
    kind = SumsTrainer if getattr(fleet, "sums_only", False) else RemoteTrainer
    remote = kind(parts, fleet, reducer)
    return remote.joined(Engine(parts, remote, reducer))


def _trainer_for(parts: TrainingParts, choice: dict[str, Any]) -> ClientTrainer:
    if choice["engine"] == "sequential":
        return SequentialTrainer(parts)
    kind = AutomaticTrainer if parts.options.engine == "auto" else VectorizedTrainer
    return kind(parts, choice["chunk_size"], "full_gradients" not in choice)


def _choose(state: TrainState, options: LocalOptions, hooks: HookCaller) -> dict[str, Any]:
    """Decides from the run's properties, not from timings, so that the choice is always the same."""
    automatic = options.engine == "auto"
    try:
        _expect_none(_against_many(state, options, hooks))
        if automatic and state.engine_choice is None:
            _expect_none(_against_speed(state, options), NotQuicker)
        if automatic:
            _expect_none(_against_auto(state, hooks))
        probe = StepProbe(state, options)
        if probe.expect_stackable() and automatic:
            raise CannotStack("the model draws random numbers, which would differ for many clients at once")
        # A resumed run keeps its chunk size: another one would change the random numbers drawn.
        kept = (state.engine_choice or {}).get("chunk_size")
        twice = any(getattr(callback, "takes_second_gradient", False) for callback in hooks.callbacks)
        size = options.chunk_size or kept or min(_own_share(state), LARGEST_CHUNK, probe.lanes_that_fit(twice))
        apart = _apart(probe, options, hooks)
    except Exception as error:  # any error of the user's code: it may work for one client at a time
        if automatic:
            why = cause_of(error, 2, otherwise="a trial step of many clients failed")
            return {"engine": "sequential", "reason": why, **({"quiet": True} if isinstance(error, NotQuicker) else {})}
        if isinstance(error, CannotStack) or out_of_memory(error):
            raise refusal(error, 2) from error
        raise
    why = "the model is small and its step goes through torch.func.vmap" if automatic else "it was asked for"
    return {"engine": "vectorized", "chunk_size": size, "reason": why, **apart}


# 1. Asked: what has to say that it works for many clients at once, and whether these would be quicker.


def _expect_none(reasons: _Reasons, kind: type[CannotStack] = CannotStack) -> None:
    """Refuses many clients at once for the first reason that holds."""
    for holds, reason in reasons:
        if holds:
            raise kind(reason)


def _against_many(state: TrainState, options: LocalOptions, hooks: HookCaller) -> _Reasons:
    """Yields what a step of many clients at once cannot do: whether the run needs it, and what is said then."""
    module, optimizer = state.module, state.optimizer.optimizer
    model, steps = type(module).__name__, type(optimizer).__name__
    yield not module.automatic_optimization, f"{model} steps its optimizers by itself"
    yield options.compile_mode is not None, "`--trainer.compile` compiles the step of a client that trains alone"
    yield module._compiler_ctx is not None, f"{model} went through `torch.compile` by itself"
    layer = cudnn_layer(module, state.vector.device)
    yield layer, f"on a GPU cuDNN computes the model's {layer} for one client at a time"
    for callback in hooks.callbacks:
        name, freezes = type(callback).__name__, is_stock(callback, "BaseFinetuning")
        yield freezes, f"{name} freezes weights for some rounds, which get no gradient then"
    for hook in _MODULE_HOOKS:
        yield overrides(module, hook), f"{model} overrides `{hook}`, which is for one client"
    for hook in _CALLBACK_HOOKS:
        for method in hooks.methods(hook):
            name = type(getattr(method, "__self__", method)).__name__
            yield True, f"{name} overrides `{hook}`, which is for one client"
    for hook in ("on_client_start", "on_before_optimizer_step"):
        for method in hooks.methods(hook):
            owner = getattr(method, "__self__", None)
            yield not (isinstance(owner, FederatedCallback) and owner.stacks), _unsaid(owner or method, hook)
    skips = options.tolerance.on_client_error == "skip"
    yield skips, "`--trainer.tolerance.on_client_error` is skip, and clients that train at once fail at once"
    by_epochs = state.optimizer.step_schedulers and Phases(state, options, hooks).by_epochs
    yield by_epochs, "its schedule steps with each local step, and clients turn from head to body at others"
    yield type(optimizer) not in ELEMENTWISE, f"{steps} is not known to step each weight by its own gradient alone"
    yield _is_watched(optimizer), f"{steps} has hooks, or another `step`, which are for one client"
    unlike = options.changes_rates and isinstance(optimizer, (ASGD, Rprop))
    yield unlike, f"the step of {steps} is not in proportion to `--trainer.participation.work.lr`"
    yield any(group.get("differentiable") for group in optimizer.param_groups), f"{steps} is differentiable"


def _is_watched(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer has step hooks, or a ``step`` that was replaced other than by a schedule."""
    replaced = vars(optimizer).get("step")
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    watched = any((*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))
    return watched or (replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"))


def _against_auto(state: TrainState, hooks: HookCaller) -> _Reasons:
    """Yields what may give another result with many clients at once, if nobody asked for them."""
    choice = state.engine_choice
    yield choice and choice["engine"] != "vectorized", "the run trained this way before it was resumed"
    for hook in ("on_client_end", "on_client_entered"):
        for method in hooks.methods(hook):
            owner = getattr(method, "__self__", method)
            yield is_own(type(owner)) and not getattr(owner, "stacks", False), _unsaid(owner, hook)
    for part in state.module.modules():
        hooked = any((part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks))
        yield hooked, f"{type(part).__name__} has forward or backward hooks, which are for one client"


def _own_share(state: TrainState) -> int:
    """Returns how many clients of a round one process trains."""
    return -(-state.cohort_size // processes_of(state.fabric).size)


def _against_speed(state: TrainState, options: LocalOptions) -> _Reasons:
    """Yields what was measured to be no faster with many clients at once."""
    device, source = state.vector.device.type, state.source
    most = _MOST_WEIGHTS.get(device, 0) * 4 // max(4, state.vector.data.element_size())
    many = state.vector.all_numel > most
    yield many, f"the model has more than {most:,} weights, above which it is not faster on {device}"
    for part in state.module.modules():
        yield not _is_quick(part), f"{type(part).__name__} is not known to be quicker for many clients at once"
    apart = not gathers(source, state.transfer)
    yield apart, "samples are read or changed one by one, which takes longer than the step of a small model"
    batch = min(source.batch_size, int(np.max(source.sizes)))
    yield batch > _LARGEST_BATCH, f"a step on {batch:,} samples is not faster for many clients at once"
    lanes = _lanes_of_a_call(state, options)
    few = f"only {lanes:.1f} clients on average would share a step, too few: {FEWEST_LANES} are needed"
    yield lanes < FEWEST_LANES, few


def _is_quick(part: nn.Module) -> bool:
    """Returns whether a part is faster for many clients: a known layer or the user's own, with at most 2-D weights."""
    own = [parameter for parameter in part._parameters.values() if parameter is not None]
    of_torch = next(kind for kind in type(part).__mro__ if kind.__module__.startswith("torch.nn."))
    return not own or ((of_torch is nn.Module or isinstance(part, _QUICK)) and all(p.ndim <= 2 for p in own))


def _lanes_of_a_call(state: TrainState, options: LocalOptions) -> float:
    """Estimates how many clients share a call of the step: those of one chunk with batches of one size at that step.

    It assumes a cohort whose sizes are spread evenly over those of all clients.
    """
    source = state.source
    sizes = samples_in_epoch(source, np.asarray(source.sizes))
    sizes = sizes[sizes > 0]
    count = min(_own_share(state), options.chunk_size or LARGEST_CHUNK)
    cohort = np.quantile(sizes, np.linspace(0, 1, count), method="nearest")
    most = options.local_steps or int(cohort.max())
    full = np.minimum(cohort // source.batch_size, most)
    rest = cohort[(cohort % source.batch_size > 0) & (full < most)]
    return float((full.sum() + len(rest)) / (full.max() + len(np.unique(rest))))


def _unsaid(owner: Any, hook: str) -> str:
    """Says which callback does not say that its hook works for many clients at once, and when it may."""
    says = "does not say" if isinstance(owner, FederatedCallback) else "is no FederatedCallback that says"
    works = f"`{hook}` works for many clients at once"
    if isinstance(owner, LossAlgorithm) and hook == "on_client_start":  # which the user has not written
        works = "`logits` and `term` go through torch.func.vmap"
    return f"{type(owner).__name__} {says} `stacks = True` (set it if its {works})"


# 2. Tried, by `StepProbe`: in train mode, and where gradients over full data are asked for in eval mode.


def _apart(probe: StepProbe, options: LocalOptions, hooks: HookCaller) -> dict[str, str]:
    """Returns why gradients over clients' full data cannot be taken at once; empty if they can or none are needed."""
    if options.full_gradients.mode == "train" or not any(map(asks_for_full_gradients, hooks.callbacks)):
        return {}
    try:
        probe.expect_stackable(in_eval=True)
    except CannotStack as reason:
        return {"full_gradients": f"one client after another, as in eval mode {reason}"}
    return {}


# 3. Watched: the steps of every chunk, which else trains again.


class AutomaticTrainer(ClientTrainer):
    """Trains clients in chunks, each chunk at once; if one fails, it and all later clients train one after another.

    A chunk is handed over only after all its steps are taken, so that it can be trained again if it fails.
    """

    def __init__(self, parts: TrainingParts, chunk_size: int, stack_full_gradients: bool) -> None:
        super().__init__(parts)
        self.one_by_one = self.start_gradients.full_gradient
        self.many = VectorizedTrainer(parts, chunk_size, stack_full_gradients, self._watched)
        self.alone: SequentialTrainer | None = None
        self.places = own_places(self.module)

    def train(self, clients: tuple[Client, ...]) -> Iterator[FinishedClient]:
        while clients and self.alone is None:
            chunk = clients[: self.many.chunk_size]
            if (trained := self._try_chunk(chunk)) is not None:
                yield from trained
                clients = clients[len(chunk) :]
        if self.alone is not None:
            yield from self.alone.train(clients)

    def _try_chunk(self, clients: tuple[Client, ...]) -> Iterator[FinishedClient] | None:
        """Trains clients at once; None if that failed for any reason: the next try is with fewer, or one at a time."""
        state, logged, counted = self.state, self.recorder.series, replace(self.parts.counts)
        trained, reason, fewer = attempt(lambda: self.many.train_chunk(clients), lambda: len(clients))
        if trained is not None:
            return self.many.finish(trained)
        self.recorder.series = logged
        self.parts.counts.take(counted)
        state.leave_client()
        state.vector.refresh()
        self._give_way(reason, fewer)
        return None

    @contextmanager
    def _watched(self, clients: tuple[Client, ...]) -> Iterator[None]:
        """Refuses steps that drew random numbers or changed what clients share, even if the trial step did not."""
        before, device = Attributes(self.module, self.places), self.state.vector.device
        try:
            yield
            drawn = random_states(device)
            seed_everywhere(seed_for(self.state.seed, Purpose.LOCAL, clients[0].round, clients[0].id))
            if random_states(device) != drawn:
                raise CannotStack("its training draws random numbers, which would differ for many clients at once")
            if name := before.shared():
                where = type(self.module).__name__
                raise CannotStack(f"{where} changes `{name}` in training, which clients trained at once would share")
        except Exception:  # any error is raised again: these clients then train again from the same attributes
            before.put_back()
            raise

    def _give_way(self, reason: str, fewer: int) -> None:
        """Prints why, and trains fewer clients at once from here on, in a resumed run too; with 0 one after another."""
        kind = f"vectorized in chunks of {fewer}" if fewer else "sequential"
        how = f"{kind} from round {self.state.round} on"
        is_news("engine", how)  # so that the next run prints its own line
        tell(f"Engine: {how}, as {reason}.")
        self.many.make_room(0)  # frees the matrices
        if fewer:
            self.many.chunk_size = fewer
            self.state.engine_choice = {**(self.state.engine_choice or {}), "chunk_size": fewer}
            return
        self.state.engine_choice = {"engine": "sequential", "reason": reason}
        self.start_gradients.go_back(self.one_by_one)
        self.parts.at_work = ()
        self.alone = SequentialTrainer(self.parts)
