"""What one fit works on, and how its clients train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NoReturn, TypeAlias

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_fed.core.buffers import GlobalBuffers
from lightning_fed.core.client_states import ClientStates
from lightning_fed.core.logged_values import TOTALS
from lightning_fed.core.optimizer.local import LocalOptimizer
from lightning_fed.core.recorder import MetricRecorder
from lightning_fed.core.updates import Client, StartGradients
from lightning_fed.core.user_code import BatchTransfer
from lightning_fed.core.vector import ParameterVector
from lightning_fed.errors import FederatedError, expect_choice, expect_count, expect_number, is_number

__all__ = [
    "CompileMode", "EngineName", "FullGradients", "LocalOptions", "NoState", "NoStateError", "Tolerance",
    "TrainState", "names_kept",
]  # fmt: skip

# What clients keep their personal parameters under in their states.
PERSONAL = "personal"

# How a cohort trains; ``_trainer_for`` of the engines has the class of each.
EngineName: TypeAlias = Literal["auto", "sequential", "vectorized"]
# The modes of torch.compile.
CompileMode: TypeAlias = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@dataclass(frozen=True)
class FullGradients:
    """How a client's gradient over its full data is taken, where a method asks for it.

    Args:
        mode: Whether the module is in ``eval`` or ``train`` mode; without dropout and batch statistics the two agree.
        batch_size: Samples that such a gradient takes at once; those of the data's batches by default.
        weight_decay: Whether the optimizer's weight decay is part of such a gradient.
    """

    mode: Literal["eval", "train"] = "eval"
    batch_size: int | None = None
    weight_decay: bool = False

    def __post_init__(self) -> None:
        """Checks every option."""
        expect_choice("--trainer.full_gradients.mode", self.mode, ("eval", "train"))
        if self.batch_size is not None:
            expect_count("--trainer.full_gradients.batch_size", self.batch_size)
        expect_choice("--trainer.full_gradients.weight_decay", self.weight_decay, (True, False))


@dataclass(frozen=True)
class Tolerance:
    """Which failures a run survives.

    Args:
        max_diverged: Share of a round's clients, in [0, 1), that may end with NaN or infinity: they are left out,
            counted and named. One more ends the run with the last good model saved; by default the first one does.
        on_client_error: Whether an exception in a client's training ends the run (``raise``), or the client is left
            out like one that diverged, and counts against the same share (``skip``, in the sequential engine).
        on_write_error: What happens if the disk is full or refuses a file: the run ends and can be resumed (``stop``),
            or goes on, warns in each such round, and tries all files again in the next round (``continue``).
        process_timeout: Minutes without a sign of life (not of work) after which a process counts as lost and the
            others end.
    """

    max_diverged: float = 0.0
    on_client_error: Literal["raise", "skip"] = "raise"
    on_write_error: Literal["stop", "continue"] = "stop"
    process_timeout: float = 30.0

    def __post_init__(self) -> None:
        """Checks every option."""
        option, share = "--trainer.tolerance.max_diverged", self.max_diverged
        expect_choice("--trainer.tolerance.on_client_error", self.on_client_error, ("raise", "skip"))
        expect_choice("--trainer.tolerance.on_write_error", self.on_write_error, ("stop", "continue"))
        expect_number("--trainer.tolerance.process_timeout", self.process_timeout, above=0)
        if not is_number(share, least=0, below=1):
            raise FederatedError(f"Expected `{option}` to be a share in [0, 1), got {share!r}.")
        if self.on_client_error == "skip" and not share:
            raise FederatedError(
                f"Expected `{option}` to be above 0 with `--trainer.tolerance.on_client_error skip`, which it bounds, "
                f"got {share!r}."
            )


@dataclass(frozen=True)
class LocalOptions:
    """How clients train: the part of the trainer's options that engines read; ``FederatedTrainer`` documents each."""

    engine: EngineName = "auto"
    chunk_size: int | None = None
    compile: bool | CompileMode = False
    local_epochs: int | float | None = None
    local_steps: int | None = None
    local_schedule: Literal["restart", "continue"] = "restart"
    full_gradients: FullGradients = FullGradients()
    tolerance: Tolerance = Tolerance()
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    accumulate_grad_batches: int = 1
    deterministic: bool | Literal["warn"] = False
    participation: Any = None

    @property
    def epochs(self) -> float | None:
        """Passes of a client over its data in a round, None where steps are counted."""
        return 1 if self.local_epochs is None and self.local_steps is None else self.local_epochs

    @property
    def changes_rates(self) -> bool:
        """Whether clients have learning rates of their own."""
        work = getattr(self.participation, "work", None)
        return work is not None and bool(work.changes_rates)

    @property
    def compile_mode(self) -> CompileMode | None:
        """The mode of ``torch.compile`` for ``training_step``, None where it is not compiled."""
        return "default" if self.compile is True else self.compile or None


def names_kept(module: nn.Module) -> frozenset[str]:
    """Returns the names of a module's parameters and of its buffers that a checkpoint holds."""
    return frozenset(
        f"{prefix}.{name}".lstrip(".")
        for prefix, part in module.named_modules()
        for name, tensor in (*part._parameters.items(), *part._buffers.items())
        if tensor is not None and name not in part._non_persistent_buffers_set
    )


def _no_second_gradient(*_: Any, **__: Any) -> NoReturn:
    raise FederatedError(
        "Expected `takes_second_gradient = True` of a client algorithm whose `on_before_optimizer_step` calls "
        "`trainer.gradient_at`, got none: nobody keeps the batch otherwise."
    )


@dataclass
class TrainState:
    """What one ``fit`` works on: the global model, the live one, and where the run stands.

    What hooks read of the trainer under the same name is explained in ``TrainerLike``.

    Attributes:
        module: The resident module.
        buffers: The global model's buffers.
        source: The clients' batches, on the device.
        transfer: Brings a batch to device and precision, by its data set's index; None if there is nothing to do.
        recorder: Takes what is logged while clients train.
        finished_round: The last round whose row was due and written.
        epochs: Rounds that are over, their checkpoints too: within a round the epoch as Lightning counts it, from 0.
        is_last_batch: Whether the current client's batch is the last of a local epoch.
        optimizer_steps: Steps of the current client's optimizers, where the module steps them itself.
        steps_before_round: Steps of the longest client of each round, summed, without those of the current client.
        totals: Sums over the run: samples seen, gradients computed, communication rounds, bytes each way, and simulated
            seconds where there are any.
        engine_choice: The engine in use, why, and how many clients it trains at once; before there is one, that of the
            checkpoint that the run goes on from.
        untrained: The parts of ``vector.all_data`` that no client's optimizer steps in this round; nothing of the
            shared part is meant by those behind it.
        initial: The personal parameters that clients begin with, and the global model has, shape (p,).
        num_personal: p, a plain number: asking a tensor for its length costs more, several times per client.
        trained: The module's parameters, each with whether it required a gradient when the round began.
        known: Names of the parameters and persistent buffers that the module had when ``fit`` began.
        client_names: Returns what clients are called, None where they have only numbers.
        held_out: Sources of what the data hold out of each client, if it is read during ``fit``.
    """

    fabric: Fabric
    module: LightningModule
    vector: ParameterVector
    weights: Tensor
    buffers: GlobalBuffers
    optimizer: LocalOptimizer
    client_states: ClientStates
    source: Any
    transfer: BatchTransfer | None
    cohort_size: int
    seed: int
    origin: Tensor
    recorder: MetricRecorder = field(default_factory=MetricRecorder)
    displacement: Tensor | None = None
    start_gradients: StartGradients | None = None
    gradient_at: Callable[..., None] = _no_second_gradient
    client: Client | None = None
    round: int = 0
    finished_round: int = 0
    epochs: int = 0
    local_step: int = 0
    optimizer_steps: int = 0
    is_last_batch: bool = False
    steps_before_round: int = 0
    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0))
    engine_choice: dict[str, Any] | None = None
    memory_format: Literal["preserve", "channels_last"] = "preserve"
    length: int | None = None  # the run's rounds, if something computes with them
    first_weights: int | None = None  # their checksum, by which nodes of a fleet know the run
    client_names: Callable[[], Sequence[str] | None] = lambda: None
    untrained: list[slice] = field(init=False)
    received: Tensor = field(init=False)
    initial: Tensor = field(init=False)
    num_personal: int = field(init=False)
    trained: list[tuple[Tensor, bool]] = field(init=False)
    known: frozenset[str] = field(init=False)
    held_out: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known, self.received = names_kept(self.module), self.weights
        self.initial, self.num_personal = self.vector.personal.clone(), self.vector.personal.numel()
        self.start_round()

    def called(self, client: int) -> str:
        """Returns a client's number for a message, with its name if it has one."""
        names = self.client_names()
        return str(client) if names is None else f"{client} ({names[client]})"

    def start_round(self) -> None:
        """Notes how every client of the round finds optimizer and data; callbacks may have changed both."""
        self.trained = [(p, p.requires_grad) for p in self.module.parameters()]
        self.optimizer.start_round()
        getattr(self.source, "close", lambda *_: None)(True)
        self.untrained = self.vector.gradients_except(self.optimizer.parameters)

    def enter(self, client: Client, origin: Tensor) -> None:
        """Notes the client that trains next, and the point that its update is measured from."""
        self._unfreeze()
        self.client, self.origin, self.displacement, self.optimizer_steps = client, origin, None, 0

    def leave_client(self) -> None:
        """Notes that no client is training."""
        self._unfreeze()
        self.client, self.local_step, self.displacement = None, 0, None

    def _unfreeze(self) -> None:
        """Undoes what a client's training or its hooks have frozen or unfrozen."""
        for p, requires_grad in self.trained:
            if p.requires_grad is not requires_grad:
                p.requires_grad = requires_grad

    def load_global_model(self) -> None:
        """Copies the global vector, with the initial personal parameters, and the buffers into the module."""
        self.vector.refresh()
        self.vector.data.copy_(self.weights)
        self.vector.personal.copy_(self.initial)
        self.buffers.load()

    def whole_model(self) -> Tensor:
        """Returns the global model as live weights have it, the initial personal parameters too, shape (d + p,)."""
        shared = self.weights.to(self.vector.dtype)
        return torch.cat([shared, self.initial.to(shared.dtype)]) if self.num_personal else shared

    def load_own(self, client: int, out: Tensor | None = None) -> None:
        """Writes a client's personal parameters, the initial ones if it has none yet, to the live weights or ``out``.

        Raises:
            FederatedError: If another process holds them.
        """
        if self.num_personal:
            out = self.vector.personal if out is None else out
            if not self.client_states.recall(PERSONAL, client, out):
                out.copy_(self.initial)

    def keep_own(self, client: int) -> None:
        """Keeps the live personal parameters as the client's."""
        if self.num_personal:
            self.client_states.store(PERSONAL, client, self.vector.personal)

    @property
    def layout(self) -> list[list[int]]:
        """The strides of the parameters in the flat vector, which order the numbers of every vector of a run."""
        return [list(p.stride()) for p in self.vector.all_parameters]

    @property
    def personal_names(self) -> list[str]:
        """The names of the parameters that stay with their client."""
        return list(self.vector.all_names[len(self.vector.names) :])

    def state_dict(self, exchange: Callable[[Any], list[Any]]) -> dict[str, Any]:
        """Returns what a run must remember between two rounds, but for the module's own ``state_dict``."""
        return {
            "round": self.round,
            # Only where the module's own precision is narrower than the global vector's.
            "weights": self.weights.clone() if self.weights.dtype != self.vector.dtype else None,
            "buffers": self.buffers.state_dict(exchange),
            "optimizer": self.optimizer.state_dict(),
            "totals": dict(self.totals),
            "client_states": self.client_states.dump(exchange),
            "layout": self.layout,
            "personal": self.personal_names,
            "engine": self.engine_choice,
            "memory_format": self.memory_format,
            "first_weights": self.first_weights,
        }

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Restores what ``state_dict`` returned; the module must hold its weights, ``folder`` the clients' records."""
        if state["weights"] is not None and state["weights"].shape != self.weights.shape:
            raise FederatedError(
                f"Expected the checkpoint to hold a global vector of shape {tuple(self.weights.shape)}, got "
                f"{tuple(state['weights'].shape)}: change `--model` or `--ckpt_path`."
            )
        self.weights.copy_(self.vector.data if state["weights"] is None else state["weights"])
        self.initial.copy_(self.vector.personal)
        self.buffers.load_state_dict(state["buffers"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.totals.update(state["totals"])
        self.round = state["round"]
        self.client_states.restore(state["client_states"], folder)
        self.engine_choice = state["engine"]
        self.first_weights = state.get("first_weights")  # not in checkpoints of 0.3

    def close(self) -> NoState:
        """Makes the module an ordinary one again; returns what can still be read."""
        self.client_states.close()
        for source in (self.source, *self.held_out):
            getattr(source, "close", lambda: None)()
        self.vector.release()
        gone = ("client_states", "vector", "gradient_at")
        return NoState(**{name: value for name, value in vars(self).items() if name not in gone})


class NoStateError(FederatedError, AttributeError):
    """Something was read that exists only during ``fit``."""


class NoState(SimpleNamespace):
    """The state outside ``fit``: it holds what is known; reading anything else raises an error of one sentence."""

    def __init__(self, **known: Any) -> None:
        start = dict.fromkeys(("round", "finished_round", "epochs", "local_step", "steps_before_round"), 0)
        none = dict.fromkeys(("client", "displacement", "engine_choice", "is_last_batch"))
        super().__init__(**{**start, **none, "totals": dict.fromkeys(TOTALS, 0), **known})

    def __getattr__(self, name: str) -> Any:
        raise NoStateError(
            f"Expected `{name}` of the trainer to be read in a hook of `fit`: it is not there otherwise."
        )
