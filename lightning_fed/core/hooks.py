"""Every hook of a federated run, its order and its arguments, documented once.

Order within ``fit``::

    setup, on_fit_start
    round 0: evaluate before any training
    for each round
        on_train_epoch_start            (Lightning's name; a round is an epoch here)
        on_round_start
        for each client of the cohort
            on_client_start             may shift the start
            for each local step
                on_local_step_start     may move the weights
                on_before_optimizer_step  may replace the gradient, then scale it, then add to it (then clipping, step)
            on_client_end               may edit the update in place, and send more (``update.send``); payloads encode
            on_client_entered           the update is part of the round; client state is written here
        decode                          of payloads, the last first
        on_before_server_step
        on_round_end                    then the aggregator steps the global model
        on_after_server_step
        validation hooks
        on_train_epoch_end
        checkpoint
    on_fit_end, teardown

Whatever their order in the list, client algorithms run first, then other callbacks, then the aggregator, then
checkpoint_contents.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.core.client_states import ClientStates
from lightning_fed.core.updates import Client, Cohort, Need, ReducedUpdate, StartGradient, StartGradients, Update
from lightning_fed.core.user_code import lightning_class, overrides
from lightning_fed.core.vector import ParameterVector
from lightning_fed.errors import FederatedError

__all__ = ["FederatedCallback", "HookCaller", "ONCE_A_ROUND", "TrainerLike", "is_stock"]

# Hooks of Lightning's own callbacks that are not called as such, but by `callbacks.lightning_callbacks` once a round.
ONCE_A_ROUND: dict[str, frozenset[str]] = {
    "ModelCheckpoint": frozenset({"setup", "on_train_batch_end", "on_validation_end", "on_train_epoch_end"}),
    "WeightAveraging": frozenset({"on_train_batch_end"}),
    # What its `on_fit_start` restores from a checkpoint lacks hyper-parameters and which weights are frozen.
    "BaseFinetuning": frozenset({"setup", "on_fit_start", "on_train_epoch_start"}),
    # Its `teardown` removes the file; Lightning does not call it after a failure.
    "OnExceptionCheckpoint": frozenset({"teardown"}),
    "LearningRateMonitor": frozenset({"on_train_start", "on_train_batch_start", "on_train_epoch_start"}),
    "DeviceStatsMonitor": frozenset(
        {"setup", *(f"on_{stage}_batch_{at}" for stage in ("train", "validation", "test") for at in ("start", "end"))}
    ),
}


def is_stock(callback: Any, kind: str) -> bool:
    """Returns whether a callback is of a class of Lightning's own, found by name: not every version has each."""
    return any(
        base.__name__ == kind and base.__module__.startswith("lightning.pytorch.callbacks")
        for base in type(callback).__mro__
    )


def _calls(callback: Callback, hook: str) -> bool:
    """Whether a hook of a callback is called where its name says."""
    return not any(hook in hooks and is_stock(callback, kind) for kind, hooks in ONCE_A_ROUND.items())


class TrainerLike(Protocol):
    """What a hook may read of the trainer; it may set ``origin``, ``displacement`` and ``should_stop``.

    Every name of Lightning's trainer that has a meaning here is there too.
    """

    origin: Tensor
    """The point from which the client's update is measured, (d,): w, unless a hook that shifts the start sets it."""
    displacement: Tensor | None
    """Set in ``on_client_start`` to take every gradient at the live weights less this vector, (d,)."""
    should_stop: bool
    """Set to end the run after the round."""
    weights: Tensor
    """The global model w, (d,), in float32 at least; the aggregator steps it in place."""
    received: Tensor
    """The model that the round's clients get, (d,): w, unless the aggregator lets them start ahead of it."""
    vector: ParameterVector
    """The live weights ``.data`` and their gradient ``.grad``, (d,); ``.add_to_gradient(term)`` adds to it."""
    client_states: ClientStates
    """What clients keep between their rounds: ``recall(key, client, out)`` and ``store(key, client, value)``."""
    start_gradients: StartGradients
    """Gradients at w over the clients' full data, where ``start_gradients`` asked for them."""
    client: Client | None
    """The client that trains now, None between clients."""
    round: int
    """Index of the round, 0 before training."""
    local_step: int
    """Local steps that the client has taken."""
    max_rounds: int
    """Rounds to train."""
    cohort_size: int
    """Clients drawn in a round."""
    client_sizes: npt.NDArray[np.int64]
    """Training samples of each client of the data, (N,)."""
    batch_size: int
    """Samples in a batch of a client."""
    local_epochs: float | None
    """Passes of a client over its data in a round, None where steps are counted."""
    local_steps: int | None
    """Local steps of a client in a round, None where epochs are counted."""
    work: Any
    """Gives clients work of their own, None where all do the same."""
    accumulate_grad_batches: int
    """Batches whose gradients make one local step."""
    gradient_clip_val: float | None
    """Bound of a client's gradient in each local step."""
    aggregator: Any
    """What the server does."""
    by_samples: bool
    """Whether a client's weight in the server's step depends on its samples."""
    callbacks: list[Callback]
    """All callbacks, in the order in which they are called."""
    lightning_module: Any
    """The module."""
    datamodule: Any
    """The data module; one that knows class labels has ``labels``, ``num_classes`` and the ``split`` over clients."""
    totals: dict[str, float]
    """Counts of the run so far: ``samples``, ``gradients``, ``comm/rounds``, ``comm/bytes_down`` and ``_up``."""
    progress_bar_metrics: dict[str, float]
    """The newest value of every metric logged with ``prog_bar``."""
    seed: int
    """The run's seed."""
    world_size: int
    """Processes that share the run."""
    is_global_zero: bool
    """Whether this process writes files."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """The clients' optimizers, in a list: one, unless the module steps several by itself."""

    def update_weight(self, client: Client) -> float:
        """The weight of a client in the server's step, before normalisation: its samples or 1."""

    def plain_updates(self, clients: Sequence[int]) -> Tensor:
        """The δ_i of plain local training of these clients, (n, d), by all processes, in ``on_round_start``."""

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        """Adds up a tensor over all processes, in place; called by all, in a hook that is called once a round."""

    def gradient_at(self, point: Tensor, out: Tensor, part: tuple[int, int] | None = None) -> None:
        """Writes the gradient of the step's batch, or of part k of n, at other live weights to `out`, both (d,)."""


class FederatedCallback(Callback):
    """A Lightning callback with the hooks of a federated round; every Lightning hook listed above works too.

    Attributes:
        stacks: Whether the hooks from a client's start to its end also work for several clients at once, in the
            vectorized engine. It calls ``on_client_start`` for all clients before any of them steps, and
            ``on_before_optimizer_step`` once for all, with vectors of shape (m, d) instead of (d,). Values kept from
            one hook to a later one must be in ``scratch``.
        adds_to_gradient: Whether ``on_before_optimizer_step`` adds a term. Terms are added in alphabetical order of
            their classes' names, whatever the order of the list, and before other callbacks' hook of this name runs.
        replaces_gradient: Whether ``on_before_optimizer_step`` writes another gradient in place of that of the loss:
            such a hook comes first. Only one client algorithm of a run can.
        scales_gradient: Whether ``on_before_optimizer_step`` scales the gradient of the loss: such a hook comes before
            all that add a term. Only one client algorithm of a run can.
        reads_length: Whether what it computes depends on ``trainer.max_rounds``: then a run of other rounds is another.
        needs: What the callback reads of the cohort's reduced update beyond what the aggregator asks for; gradients
            and losses only if that asks for them too.
        lanes: Set while several clients train at once: their largest number, and whose vectors ``scratch`` returns.
    """

    stacks: bool = False
    adds_to_gradient: bool = False
    replaces_gradient: bool = False
    scales_gradient: bool = False
    reads_length: bool = False
    needs: Need = Need.NOTHING
    lanes: tuple[int, int | slice] | None = None

    def start_gradients(self, round: int) -> StartGradient:
        """Says which gradients g_i = ∇f_i(w) over a client's full data the callback needs before local training.

        Returns:
            ``client``: the gradient of the client about to train, in ``trainer.start_gradients.gradient`` from its
            ``on_client_start`` on. ``cohort``: the gradients of all clients and their mean, before any client trains;
            this takes one more communication. Each is computed once, however many callbacks ask for it.
        """
        return "none"

    def scratch(self, name: str, like: Tensor) -> Tensor:
        """Returns a working vector, made once and reused by every client.

        While several clients train at once, each has a vector of its own, a row of a matrix.

        Args:
            name: Its name within the algorithm.
            like: Tensor of shape (d,), or (m, d) where a hook is called for m clients; gives dtype and device.

        Returns:
            The vector, or those of the m clients, as last written; zeros at first.
        """
        vectors: dict[str, Tensor] = self.__dict__.setdefault("_vectors", {})
        kept, shape = vectors.get(name), like.shape if self.lanes is None else (self.lanes[0], like.shape[-1])
        if kept is None or kept.shape != shape or kept.dtype != like.dtype or kept.device != like.device:
            kept = vectors[name] = like.new_zeros(shape)
        return kept if self.lanes is None else kept[self.lanes[1]]

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.__dict__.pop("_vectors", None)

    def on_round_start(self, trainer: TrainerLike, pl_module: LightningModule, cohort: Cohort) -> None:
        """Called when the cohort of a round is drawn; the module holds the global model."""

    def on_client_start(self, trainer: TrainerLike, pl_module: LightningModule, client: Client) -> None:
        """Called when the module holds the global model and this client is about to train; may shift the start."""

    def on_local_step_start(self, trainer: TrainerLike, pl_module: LightningModule, client: Client, step: int) -> None:
        """Called before each local optimizer step (0-based within the client and round); may move the weights."""

    def on_client_end(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        """Called when a client has trained; may edit ``update.delta`` in place, and send more by ``update.send``."""

    def on_client_entered(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        """Called when a client's update is part of the round; never for one that diverged or took no step.

        What a client keeps from round to round is written here; the live model is still the client's.
        """

    def on_before_server_step(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        """Called with the reduced update of the cohort, before the aggregator uses it."""

    def on_round_end(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        """Called before the aggregator steps ``trainer.weights`` in place; not if a round leaves the model as it is."""

    def on_after_server_step(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        """Called after the server step; ``trainer.weights`` and the module hold the new global model."""


class HookCaller:
    """Calls a hook of every callback, in the trainer's order, then that of the module: ``hooks("on_fit_start")``.

    Args:
        trainer: Has ``callbacks``, ``aggregator`` and ``lightning_module``, and is what hooks are called with.

    Attributes:
        stopper: What set ``trainer.should_stop``, with the metric that it monitors; empty if nothing did.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.stopper = ""

    @property
    def callbacks(self) -> list[Callback]:
        """All callbacks, in the order in which they are called."""
        callbacks: list[Callback] = self.trainer.callbacks
        return callbacks

    def __call__(self, hook: str, *args: Any, module: bool = True, monitors: bool | None = None) -> None:
        """Calls a hook with its arguments after trainer and module.

        Args:
            hook: Name of the hook.
            *args: Those arguments.
            module: Whether to call it on the module, if that has one of this name.
            monitors: Only those callbacks that monitor a metric (True), only the others (False), or all.
        """
        own = self.trainer.lightning_module
        for callback in self.callbacks:
            if monitors is not None and isinstance(callback, (EarlyStopping, Checkpoint)) != monitors:
                continue
            method: Callable[..., Any] | None = getattr(callback, hook, None)
            if method is not None and _calls(callback, hook):
                try:
                    method(self.trainer, own, *args)
                except RuntimeError as error:
                    if isinstance(callback, EarlyStopping):  # a monitor that nobody logs
                        raise FederatedError(f"EarlyStopping cannot go on: {' '.join(str(error).split())}") from error
                    raise
                self._note_stop(callback)
        if module and hasattr(own, hook):
            getattr(own, hook)(*args)
            self._note_stop(own)

    def _note_stop(self, part: Any) -> None:
        """Keeps who was the first to end the run."""
        if self.trainer.should_stop and not self.stopper:
            monitor = getattr(part, "monitor", None)
            self.stopper = type(part).__name__ + (f" on {monitor}" if isinstance(monitor, str) else "")

    def methods(self, hook: str) -> list[Callable[..., Any]]:
        """Returns the hook of every callback that overrides it, as a bound method."""
        bases = {FederatedCallback, *(lightning_class(type(callback), "Callback") for callback in self.callbacks)}
        empty = (None, *(getattr(base, hook, None) for base in bases))
        callbacks = self.callbacks
        if hook == "on_before_optimizer_step":
            kinds = ("replaces_gradient", "scales_gradient", "adds_to_gradient")
            first = [cb for cb in callbacks if any(getattr(cb, kind, False) for kind in kinds)]
            others = [cb for cb in callbacks if cb not in first]
            callbacks = [*sorted(first, key=_place_in_step), *others]
        return [
            getattr(callback, hook)
            for callback in callbacks
            if (hook in vars(callback) or getattr(type(callback), hook, None) not in empty) and _calls(callback, hook)
        ]

    def bound(self, hook: str, module: bool = False) -> list[Callable[..., Any]]:
        """Returns the hook of all that override it, bound to trainer and module; the module's own, if asked for, last.

        Hooks that are called for every step and client are thus looked up only once.
        """
        own = self.trainer.lightning_module
        found: list[Callable[..., Any]] = [partial(method, self.trainer, own) for method in self.methods(hook)]
        return found + ([getattr(own, hook)] if module and overrides(own, hook) else [])


def _place_in_step(callback: Any) -> tuple[bool, bool, str]:
    """Puts what replaces the gradient first, then what scales it, and what adds to it in the order of names."""
    replaces, scales = (getattr(callback, kind, False) for kind in ("replaces_gradient", "scales_gradient"))
    return not replaces, not scales, type(callback).__qualname__
