"""The data exchanged in a round: clients, their updates, and the reduced update that the server gets."""

from dataclasses import dataclass, field
from enum import Flag, auto
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

__all__ = [
    "ByRound", "Client", "Cohort", "Need", "Packed", "ReducedUpdate", "RoundCounts", "StartGradient",
    "StartGradients", "Update", "at_round",
]  # fmt: skip

StartGradient: TypeAlias = Literal["none", "client", "cohort"]
# What is sent in place of δ_i: tensors, which take the bytes of their dtype, or integers with the bits that each takes.
Packed: TypeAlias = dict[str, Tensor | tuple[Tensor, int]]
ByRound: TypeAlias = float | dict[int, float]  # one number, or numbers by the first round of each: see ``at_round``


@dataclass(frozen=True)
class Client:
    """One client in one round.

    Attributes:
        id: Client id in [0, N).
        num_samples: Training samples of the client, s_i, at least 1 (a client without samples is skipped).
        round: Round index, from 1.
        steps: Local steps of this client if it has a number of its own, None if it takes as many as all.
        lr_factor: Factor on the learning rate of each of its local steps.
    """

    id: int
    num_samples: int
    round: int
    steps: int | None = None
    lr_factor: float = 1.0


@dataclass(frozen=True)
class Cohort:
    """The clients drawn for one round.

    Attributes:
        round: Round index, from 1.
        clients: Those that train, in ascending order of id.
        skipped: Ids drawn but left out: those that hold no samples, or are not waited for.
    """

    round: int
    clients: tuple[Client, ...]
    skipped: tuple[int, ...] = ()

    @property
    def num_samples(self) -> int:
        """Training samples over the cohort, Σ s_i."""
        return sum(client.num_samples for client in self.clients)


@dataclass
class Update:
    """What one client sends back.

    Attributes:
        client: The client.
        delta: δ_i, tensor of shape (d,) in the dtype of the global vector (float32 or wider): w_i minus the point that
            the client started from, which is w unless a client algorithm displaced it. It is a buffer reused for the
            next client: clone what must outlive the hook.
        num_steps: Optimizer steps taken, K_i.
        buffers: The client's buffers after training, by name; live tensors of the module, not copies.
        weight: Aggregation weight before normalisation (samples or 1), set by the aggregator's weighting.
        optimizer_distance: a_i, how far K_i steps move a weight whose gradient is always 1, weight decay off (K_i times
            the learning rate for plain SGD); computed where ``Need.NORMALIZED_MEAN`` or a client algorithm asks for it.
        gradient: g_i, the client's gradient where the aggregator's ``gradient_at`` says, shape (d,), in the dtype of
            ``delta`` and reused like it; None unless asked for.
        loss: f_i, the client's mean loss where g_i was taken, or for ``Need.ANY_LOSS`` where the aggregator's
            ``losses_at`` says, shape (); None unless asked for.
        bytes_up: What δ_i takes on its way to the server: d numbers of the model's, unless a payload says otherwise.
        sums: What the client sends besides δ_i, by name; see ``send``.
        factors: What each of them is multiplied by in its sum, 1 if it is not named.
        implied: The names of those that the server could compute from what is sent anyway: they take no bytes.
        coded_by: The payload that has made it shorter.
        bounded: δ_i and its version when a payload bounded its length last.
        packed: What the payload sends in place of δ_i, None if δ_i is sent.
    """

    client: Client
    delta: Tensor
    num_steps: int
    buffers: dict[str, Tensor] = field(default_factory=dict)
    weight: float = 1.0
    optimizer_distance: float = 1.0
    gradient: Tensor | None = None
    loss: Tensor | None = None
    bytes_up: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)
    implied: set[str] = field(default_factory=set)
    coded_by: str = ""
    bounded: tuple[Tensor, int] | None = None
    packed: Packed | None = None

    def send(self, name: str, value: Tensor, factor: float = 1.0, implied: bool = False) -> None:
        """Sends a tensor besides δ_i, in ``on_client_end``: the server gets Σ_i ``factor`` ``value`` over the clients.

        It is ``ReducedUpdate.sums[name]``, added up in ascending order of client id as the updates are. What a method
        sends is floating-point, of one shape, and may be a buffer that is reused for the next client.
        """
        self.sums[name], self.factors[name] = value, factor
        if implied:
            self.implied.add(name)

    @property
    def numbers_beside(self) -> int:
        """How many numbers are sent besides δ_i; a number alone is not counted."""
        return sum(value.numel() for name, value in self.sums.items() if value.dim() and name not in self.implied)

    @property
    def took_step(self) -> bool:
        """Whether the client's optimizer moved it: a step at learning rate 0 is none."""
        return bool(self.num_steps and self.optimizer_distance)

    @property
    def distance(self) -> float:
        """The former name of ``optimizer_distance``."""
        return self.optimizer_distance

    @distance.setter
    def distance(self, value: float) -> None:
        self.optimizer_distance = value


@dataclass
class RoundCounts:
    """What the training of a round has taken.

    Attributes:
        samples: Samples that went through local steps.
        gradients: Samples whose gradient, or loss alone, was computed for a method besides: at the start or the end of
            clients, or at other points of steps.
        bytes_up: What updates took on their way to the server.
        max_steps: Local steps of the client that took most, or its optimizers' if it steps them itself.
    """

    samples: int = 0
    gradients: int = 0
    bytes_up: int = 0
    max_steps: int = 0

    def take(self, *others: "RoundCounts") -> None:
        """Becomes equal to those of another, or of all processes together."""
        sums = {name: sum(getattr(other, name) for other in others) for name in ("samples", "gradients", "bytes_up")}
        vars(self).update(sums, max_steps=max(other.max_steps for other in others))


class StartGradients(Protocol):
    """g_i = ∇f_i(w) and f_i(w) over each client's full data, computed once for every part that asks.

    A part asks by ``FederatedCallback.start_gradients``. Tensors are in the dtype of the global vector and are reused
    in the next round.

    Attributes:
        gradient: g_i of the client about to train, shape (d,).
        loss: f_i of that client, shape ().
        clients: The n clients of the exchange; empty if no part asks for those of the cohort.
        weights: Their aggregation weights p_i, shape (n,), float64, summing to 1.
        mean: g̅ = Σ p_i g_i, shape (d,).
    """

    gradient: Tensor
    loss: Tensor
    clients: tuple[Client, ...]
    weights: Tensor
    mean: Tensor

    @property
    def rows(self) -> Tensor:
        """The clients' g_i in ascending order of client id, shape (n, d).

        With several processes each holds those of its own clients. The first read in a round gathers them, so it must
        be in a hook that every process calls once a round.
        """

    @property
    def losses(self) -> Tensor:
        """Their f_i, shape (n,); see ``rows``."""

    def losses_now(self, clients: tuple[Client, ...]) -> Tensor:
        """Computes f_i of clients of the round at the global model as it is now, shape (n,), float64, on the CPU.

        For a rule with ``Need.LOSSES``, over what its ``losses_over`` says, by forward passes whose samples count.
        Called by all processes, in a hook that is called once a round; after the server's step it is f_i(w⁺).
        """

    def look_at(self, clients: tuple[Client, ...], out: Tensor) -> None:
        """Computes g_i of any clients into ``out``, shape (n, d), for a diagnostic; it is not counted as cost."""


class Need(Flag):
    """What an aggregator or a mask asks the loop to reduce over the cohort.

    All are running (d,) vectors but ``UPDATES`` and ``GRADIENTS``, which keep a whole (n, d) matrix, and ``LOSSES``:
    f_i of each client, a number, by a forward pass where the aggregator's ``losses_at`` and ``losses_over`` say.
    ``OWN_LOSS`` is the same, for what a client sends in ``on_client_end``: servers that see sums alone never get it.
    """

    NOTHING = 0
    MEAN = auto()
    SUM = auto()
    ABS_SUM = auto()
    SIGN_SUM = auto()
    WEIGHTED_SIGN_SUM = auto()
    VARIANCE = auto()
    NORMALIZED_MEAN = auto()
    GRADIENT_MEAN = auto()
    GRADIENT_SIGN_SUM = auto()
    UPDATES = auto()
    GRADIENTS = auto()
    LOSSES = auto()
    OWN_LOSS = auto()
    ANY_LOSS = LOSSES | OWN_LOSS
    GRADIENT_SUMS = GRADIENT_MEAN | GRADIENT_SIGN_SUM
    ANY_GRADIENT = GRADIENT_SUMS | GRADIENTS
    # What can be had where nobody sees a single update.
    SUMS = MEAN | SUM | ABS_SUM | SIGN_SUM | WEIGHTED_SIGN_SUM | NORMALIZED_MEAN | GRADIENT_SUMS | OWN_LOSS


_NOTHING = torch.empty(0)


@dataclass
class ReducedUpdate:
    """The cohort's updates, reduced in ascending order of client id.

    What was not asked for is an empty tensor. g_i is the client's gradient at the point that the aggregator names.

    Attributes:
        round: Round index, from 1.
        clients: The n clients that entered.
        num_registered: N, all clients of the data set that hold samples.
        weights: Their aggregation weights p_i, shape (n,), float64, summing to 1; all 0 leave the model as it is.
        mean: Δ = Σ p_i δ_i, shape (d,), for ``Need.MEAN``.
        sum: Σ δ_i, shape (d,), for ``Need.SUM``.
        abs_sum: Σ |δ_i|, shape (d,), for ``Need.ABS_SUM``.
        sign_sum: Σ sign(δ_i), shape (d,), for ``Need.SIGN_SUM``.
        weighted_sign_sum: Σ s_i sign(δ_i) with s_i in samples, shape (d,), float64, for ``Need.WEIGHTED_SIGN_SUM``.
        variance: The unbiased, unweighted variance of δ_i, shape (d,), zero for one client, for ``Need.VARIANCE``.
        normalized_mean: Σ p_i δ_i / a_i, shape (d,), for ``Need.NORMALIZED_MEAN``; a_i are the ``optimizer_distance``.
        mean_distance: Σ p_i a_i, for ``Need.NORMALIZED_MEAN``.
        gradient_mean: Σ p_i g_i, shape (d,), for ``Need.GRADIENT_MEAN``.
        gradient_sign_sum: Σ sign(g_i), shape (d,), for ``Need.GRADIENT_SIGN_SUM``.
        updates: δ_i, shape (n, d), for ``Need.UPDATES``.
        gradients: g_i, shape (n, d), for ``Need.GRADIENTS``.
        losses: f_i, the client's mean loss where g_i was taken, shape (n,), float64, on the CPU, for
            ``Need.GRADIENTS``, or where ``losses_at`` says for ``Need.LOSSES``.
        buffers: The reduced buffers by name (floating: weighted mean in double precision, integer: maximum); empty
            unless averaged.
        sums: What clients sent besides δ_i, added up, by name; without those names that no client of the round sent.
        noise: Standard deviation of the noise on each coordinate of ``mean``, 0 unless a payload has added some.
    """

    round: int
    clients: tuple[Client, ...] = ()
    num_registered: int = 0
    weights: Tensor = _NOTHING
    mean: Tensor = _NOTHING
    sum: Tensor = _NOTHING
    abs_sum: Tensor = _NOTHING
    sign_sum: Tensor = _NOTHING
    weighted_sign_sum: Tensor = _NOTHING
    variance: Tensor = _NOTHING
    normalized_mean: Tensor = _NOTHING
    mean_distance: float = 0.0
    gradient_mean: Tensor = _NOTHING
    gradient_sign_sum: Tensor = _NOTHING
    updates: Tensor = _NOTHING
    gradients: Tensor = _NOTHING
    losses: Tensor = _NOTHING
    buffers: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    noise: float = 0.0

    @property
    def num_clients(self) -> int:
        """The number of clients that entered, n."""
        return len(self.clients)


def at_round(given: ByRound, round: int) -> float:
    """Returns the number of a round, which stays until the next named one; 0 before the first.

    ``{1: 0.1, 50: 0.01}`` is 0.1 up to round 49. It depends on the round alone, so a resumed run goes on with the same.
    ``expect_number`` with ``by_round`` checks it; if 0 is not allowed, the first number must be that of round 1.
    """
    if not isinstance(given, dict):
        return given
    named = [first for first in given if first <= round]
    return given[max(named)] if named else 0.0
