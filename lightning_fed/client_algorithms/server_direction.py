"""Local steps that follow, or look at, the way the server went last: FedCM, MimeLite, FedLESAM, FedGaLA."""

from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import Client, Cohort, ReducedUpdate, StartGradient, Update
from lightning_fed.errors import expect_choice, expect_number
from lightning_fed.functional.clients import difference, of_length, optimizer_distance

__all__ = ["FedCM", "FedGaLA", "FedLESAM", "MimeLite", "MomentumAlgorithm"]


class MomentumAlgorithm(ClientAlgorithm, ABC):
    """The base of algorithms whose local steps follow a vector m of all clients, fixed during a round.

    Attributes:
        momentum: m, shape (d,), None before the first round.
    """

    stacks = True
    scales_gradient = True
    momentum: Tensor | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self.momentum = None

    def on_round_start(self, trainer: TrainerLike, pl_module: LightningModule, cohort: Cohort) -> None:
        """Gets m ready, which changes only when the round is over."""
        if self.momentum is None:
            self.momentum = torch.zeros_like(trainer.weights)
        self.momentum = self.momentum.to(trainer.weights)

    @abstractmethod
    def on_client_end(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        """Sends what the next m is made of, weighted, under the name of the class."""

    def mix(self, trainer: TrainerLike, own: float, common: float) -> None:
        """Replaces the gradient g by own * g + common * m; nothing is done where the gradient's share is 1."""
        assert self.momentum is not None
        if own < 1:
            trainer.vector.scale_gradient(own)
            trainer.vector.add_to_gradient(self.momentum, alpha=common)

    def mean(self, trainer: TrainerLike, update: ReducedUpdate) -> Tensor:
        """Returns what clients sent over their weights."""
        return update.sums[type(self).__name__] / sum(map(trainer.update_weight, update.clients))

    def state_dict(self) -> dict[str, Any]:
        return {} if self.momentum is None else {"momentum": self.momentum.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.momentum = state_dict.get("momentum")


class FedCM(MomentumAlgorithm):
    """Replaces every local gradient g by α g + (1 - α) m, with m the mean direction of the last round's local steps.

    Xu, Wang, Wang, Yao, "FedCM: Federated Learning with Client-level Momentum", 2021, arXiv:2106.10874, Algorithm 1.
    m = -Σ p_i δ_i / a_i with the a_i of the client's own steps, K_i η for plain SGD; momentum and schedules are
    simulated exactly, see ``sgd_distance``. Before the first round m = 0. Terms of other algorithms are added after it,
    whatever their names: they are not scaled, and FedProx's pull is no part of m. α = 1 is plain local training, bit
    for bit.

    Args:
        alpha: α in (0, 1]. The paper takes 0.1.
    """

    needs_distance = True
    adds_linear_term = True
    vectors_down = 1

    def __init__(self, alpha: float = 0.1) -> None:
        self.alpha = expect_number("--client.alpha", alpha, above=0, most=1, of="FedCM")

    def check(self, trainer: TrainerLike) -> None:
        """Refuses any client optimizer but SGD, whose distance is known, and a client's own linear term beside it."""
        super().check(trainer)
        self.expect_no_linear_term(trainer, "whose terms would become part of m as if they were the clients' gradients")
        optimizer_distance(trainer.optimizers[0], [], asked_by="--client")

    def on_before_optimizer_step(self, trainer: TrainerLike, pl_module: LightningModule, optimizer: Any) -> None:  # type: ignore[override]  # our trainer stands in
        self.mix(trainer, self.alpha, 1 - self.alpha)

    def on_client_end(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        """Sends -δ_i / a_i, weighted: what local steps moved, whatever others make of the update."""
        moved = difference(trainer.vector.data, trainer.origin, self.scratch("moved", trainer.weights))
        share = -trainer.update_weight(update.client) / update.optimizer_distance
        update.send(type(self).__name__, moved, share, implied=True)

    def on_round_end(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        """Makes of the round's steps the next m, unless the round leaves the model as it is."""
        self.momentum = self.mean(trainer, update)


class MimeLite(MomentumAlgorithm):
    """Replaces every local gradient g by (1 - β) g + β m, with the server's m <- β m + (1 - β) Σ p_i ∇f_i(w).

    Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh, "Breaking the centralized barrier for cross-device federated
    learning", NeurIPS 2021, Algorithm 1 (MimeLite) with the momentum of SGDm. ∇f_i(w) is over all of a client's data at
    the model that the round starts from, the mean is over the round's clients, m is fixed during the round and 0 in the
    first. Terms of other algorithms are added after it. β = 0 is plain local training, bit for bit.

    Args:
        beta: β in [0, 1).
    """

    def __init__(self, beta: float = 0.9) -> None:
        self.beta = expect_number("--client.beta", beta, least=0, below=1, of="MimeLite")
        self.sends_gradient, self.vectors_down = beta > 0, int(beta > 0)

    def start_gradients(self, round: int) -> StartGradient:
        return "client" if self.beta else "none"

    def on_before_optimizer_step(self, trainer: TrainerLike, pl_module: LightningModule, optimizer: Any) -> None:  # type: ignore[override]  # our trainer stands in
        self.mix(trainer, 1 - self.beta, self.beta)

    def on_client_end(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        if self.beta:  # the gradient is counted as such, as others may need it too
            gradient, weight = trainer.start_gradients.gradient, trainer.update_weight(update.client)
            update.send(type(self).__name__, gradient, weight, implied=True)

    def on_round_end(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        """Moves m by the mean of the round's gradients, unless the round leaves the model as it is."""
        if self.beta:
            assert self.momentum is not None
            self.momentum = self.momentum.mul(self.beta).add_(self.mean(trainer, update), alpha=1 - self.beta)


class _LastStepAlgorithm(ClientAlgorithm):
    """The base of algorithms whose clients get the server's last step, if ``vectors_down`` is not 0.

    Attributes:
        last_step: w - w_old, shape (d,), as the server took it; None before the second round.
    """

    last_step: Tensor | None = None
    _old: Tensor | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._old = self.last_step = None

    def on_round_start(self, trainer: TrainerLike, pl_module: LightningModule, cohort: Cohort) -> None:
        if self._old is not None:
            self.last_step = trainer.weights - self._old.to(trainer.weights)

    def on_before_server_step(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        if self.vectors_down:
            self._old = trainer.weights.clone()

    def state_dict(self) -> dict[str, Any]:
        return {} if self._old is None else {"old": self._old}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._old = state_dict.get("old")


class FedLESAM(_LastStepAlgorithm):
    """Takes every local gradient uphill of the server's way: g = ∇f(w_i + ρ (w_old - w) / ‖w_old - w‖).

    Fan, Hu, Yao, Niu, Zhang, Sugiyama, Wang, "Locally Estimated Global Perturbations are Better than Local
    Perturbations for Federated Sharpness-aware Minimization", ICML 2024. w_old is the global model that the client got
    in its last round (``own``, the paper), which it keeps, or that the server had before its last step (``last``, the
    authors' code), which goes down with the model. A client without w_old climbs nowhere. The norm is over the whole
    vector; the authors' code takes the sum of the tensors' norms, which makes the way shorter. ρ = 0 is plain local
    training, bit for bit.

    Args:
        rho: ρ of at least 0, in units of the weights.
        since: Whose former model is w_old: that of the client's ``own`` last round, or of the server's ``last``.
    """

    stacks = True
    displaces = True
    adds_to_gradient = False

    def __init__(self, rho: float = 0.1, since: Literal["own", "last"] = "own") -> None:
        self.rho = expect_number("--client.rho", rho, least=0, of="FedLESAM")
        self.since = expect_choice("--client.since", since, ("own", "last"), of="FedLESAM")
        self.vectors_down = int(rho > 0 and since == "last")
        self._shift: Tensor | None = None

    def on_round_start(self, trainer: TrainerLike, pl_module: LightningModule, cohort: Cohort) -> None:
        super().on_round_start(trainer, pl_module, cohort)
        self._shift = None if self.last_step is None else of_length(self.rho, self.last_step.clone())

    def on_client_start(self, trainer: TrainerLike, pl_module: LightningModule, client: Client) -> None:
        if self.vectors_down:
            trainer.displacement = self._shift
        elif self.rho:
            shift = self.scratch("shift", trainer.weights)
            if trainer.client_states.recall("FedLESAM", client.id, shift):
                trainer.displacement = of_length(self.rho, shift.sub_(trainer.received).neg_())

    def on_client_entered(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        if self.rho and self.since == "own":
            trainer.client_states.store("FedLESAM", update.client.id, trainer.received)


class FedGaLA(_LastStepAlgorithm):
    """Drops gradients, tensor by tensor, by the angle to the server's last step: g_l <- 0 where cos(g_l, Δ_l) < τ.

    Δ is that step. Pourpanah, Molahasani, Soltany, Greenspan, Etemad, "Federated Unsupervised Domain Generalization
    Using Global and Local Alignment of Gradients", AAAI 2025: local alignment as the authors' code has it, whose server
    half is ``FedGaLAServer``. As g points uphill, that keeps steps against Δ; ``compare`` ``step`` takes cos(-g_l, Δ_l)
    and keeps those along it. A tensor that is 0 in g or Δ has no direction and is kept. In the first round, and with
    τ = -1, it is plain training, bit for bit.

    Args:
        threshold: τ in [-1, 1].
        compare: Whether the ``gradient`` g, or the ``step`` -g, has to go the way of Δ.
    """

    stacks = True
    scales_gradient = True

    def __init__(self, threshold: float = 0.0, compare: Literal["gradient", "step"] = "gradient") -> None:
        self.threshold = expect_number("--client.threshold", threshold, least=-1, most=1, of="FedGaLA")
        self.compare = expect_choice("--client.compare", compare, ("gradient", "step"), of="FedGaLA")
        self.vectors_down = int(threshold > -1)

    def on_round_start(self, trainer: TrainerLike, pl_module: LightningModule, cohort: Cohort) -> None:
        super().on_round_start(trainer, pl_module, cohort)
        self._sizes = [p.numel() for p in trainer.vector.parameters]

    def on_before_optimizer_step(self, trainer: TrainerLike, pl_module: LightningModule, optimizer: Any) -> None:  # type: ignore[override]  # our trainer stands in
        if self.last_step is None:
            return
        sign = -1 if self.compare == "step" else 1
        gradients = torch.split(trainer.vector.grad, self._sizes, dim=-1)
        for gradient, way in zip(gradients, torch.split(self.last_step, self._sizes), strict=True):
            along = sign * (gradient @ way.to(gradient))
            lengths = torch.linalg.vector_norm(gradient, dim=-1) * torch.linalg.vector_norm(way)
            gradient.mul_((along >= self.threshold * lengths)[..., None])
