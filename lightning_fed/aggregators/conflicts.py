"""Rules for clients whose updates pull against each other."""

from abc import abstractmethod
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.aggregators.base import Aggregator
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.seeding import Purpose, numpy_generator_for
from lightning_fed.core.updates import ByRound, Need, ReducedUpdate
from lightning_fed.errors import expect_count, expect_number
from lightning_fed.functional.conflicts import (
    Array,
    alignment_weights,
    cagrad_weights,
    fedawa_offsets,
    fedfv_weights,
    mgda_weights,
    pcgrad_weights,
    square_of_sum,
    ties_mean,
    without_conflicts,
)
from lightning_fed.functional.geometry import combine_rows, gram_matrix, value_order, wide_dtype
from lightning_fed.functional.server import term_weights

__all__ = [
    "TIES", "CombiningAggregator", "FedAWA", "FedFV", "FedGaLAServer", "FedMGDA", "FedOMG", "PCGrad",
    "SignMajority",
]  # fmt: skip


class SignMajority(Aggregator):
    """Moves every coordinate by η_g towards the sign that most clients give it: w <- w + η_g sign(Σ sign(δ_i)).

    Bernstein, Zhao, Azizzadenesheli, Anandkumar, "signSGD with Majority Vote is Communication Efficient and Fault
    Tolerant", ICLR 2019, Algorithm 1, with updates of local training instead of gradients. A tie leaves the coordinate
    unchanged. The weights p_i are not used.

    Args:
        lr: η_g, above 0: how far every coordinate moves in a round, unless there is a tie.
        **kwargs: Options of every aggregator.
    """

    needs = Need.SIGN_SUM
    weighs_updates = False
    mask_refusal = "its step already is the clients' vote, and a mask would count it a second time"

    def __init__(self, lr: ByRound = 1e-3, **kwargs: Any) -> None:
        super().__init__(lr=lr, **kwargs)

    def server_step(self, update: ReducedUpdate) -> Tensor:
        return update.sign_sum.sign()


class TIES(Aggregator):
    """Adds, coordinate by coordinate, the mean over the clients whose sign is elected; see ``ties_mean``.

    Yadav, Tam, Choshen, Raffel, Bansal, "TIES-Merging: Resolving Interference When Merging Models", NeurIPS 2023,
    Algorithm 1; η_g is its λ. The weights p_i are not used. With ``keep`` 1 it is FedAvg with uniform weighting in
    coordinates where all clients have the same sign.

    Args:
        keep: Share of its coordinates that each client keeps, the largest ones, in (0, 1].
        **kwargs: Options of every aggregator.
    """

    needs = Need.UPDATES
    weighs_updates = False
    mask_refusal = "in each coordinate it already leaves out the clients of the other sign"

    def __init__(self, keep: float = 0.2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.keep = expect_number("--aggregator.keep", keep, above=0, most=1)

    def server_step(self, update: ReducedUpdate) -> Tensor:
        return ties_mean(update.updates, self.keep)


class CombiningAggregator(Aggregator):
    """The base of rules that add Σ c_i δ_i, with c_i computed from the inner products of the updates.

    Such a rule holds all updates of the cohort in memory, shape (n, d).

    Attributes:
        step_weights: c_i of the last round, shape (n,), float64, on the CPU; empty before the first.
    """

    needs = Need.UPDATES
    step_weights: Tensor = torch.empty(0, dtype=torch.float64)

    @abstractmethod
    def combine(self, gram: Array, shares: Array, round: int) -> Array:
        """Computes c_i, shape (n,).

        Args:
            gram: ⟨δ_i, δ_j⟩, shape (n, n), in ascending order of client id.
            shares: p_i, shape (n,), summing to 1.
            round: Index of the round, from 1.
        """

    def server_step(self, update: ReducedUpdate) -> Tensor:
        rows, shares = update.updates, update.weights.numpy()
        gram = gram_matrix(rows).cpu().double().numpy()  # copied once: the code below reads single numbers
        self.step_weights = torch.from_numpy(self.combine(gram, shares, update.round))
        return combine_rows(rows, self.step_weights.to(rows.device, wide_dtype(rows))).to(rows.dtype)

    def client_figures(self) -> dict[str, Tensor]:
        return {"step_weight": self.step_weights}


class PCGrad(CombiningAggregator):
    """Removes conflicts between updates, then averages: w <- w + η_g Σ p_i g_i; see ``pcgrad_weights``.

    Yu, Kumar, Gupta, Levine, Hausman, Finn, "Gradient Surgery for Multi-Task Learning", NeurIPS 2020, Algorithm 1,
    there for gradients of tasks and their sum. The order in which each update is compared with the others is drawn anew
    each round, from the run's seed. Without conflicts it is FedAvg, up to rounding.
    """

    def step(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        self._seed = trainer.seed
        super().step(trainer, pl_module, update)

    def combine(self, gram: Array, shares: Array, round: int) -> Array:
        others = np.array([np.delete(np.arange(len(gram)), i) for i in range(len(gram))])
        draw = numpy_generator_for(self._seed, Purpose.SERVER, round)
        return pcgrad_weights(gram, shares, draw.permuted(others, axis=1))


class FedFV(CombiningAggregator):
    """PCGrad in the order of losses and across rounds, scaled to the mean's length; see ``fedfv_weights``.

    Wang, Fan, Qi, Wen, Wang, Yu, "Federated Learning with Fair Averaging", IJCAI 2021, Algorithms 1 to 3. f_i is the
    client's mean loss at w. Then conflicts with clients absent from this round are removed from the step: with their
    last updates if these are at most τ rounds old, the oldest first; see ``without_conflicts``. Last the step is scaled
    to the length of the mean. α = 1 and τ = 0 is FedAvg, up to rounding.

    Args:
        alpha: α in [0, 1]: the updates of this share of the cohort, with the largest losses, stay unchanged: at least
            one, unless α is 0.
        tau: τ, at least 0: how many earlier rounds are used. The server keeps their updates.
        weighting: p_i before normalisation: 1 (``uniform``, the paper) or s_i (``samples``).
        **kwargs: Options of every aggregator.
    """

    needs = Need.UPDATES | Need.LOSSES

    def __init__(
        self,
        alpha: float = 0.1,
        tau: int = 1,
        weighting: Literal["samples", "uniform"] = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(weighting=weighting, **kwargs)
        self.alpha = expect_number("--aggregator.alpha", alpha, least=0, most=1)
        self.tau = expect_count("--aggregator.tau", tau, least=0)
        self.former: dict[int, tuple[int, Tensor]] = {}  # round and update of each client of the last τ rounds, by id

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self.former = {}

    def combine(self, gram: Array, shares: Array, round: int) -> Array:
        self._square, self._lengths = square_of_sum(gram, shares), np.sqrt(gram.diagonal())  # ‖Δ‖², ‖δ_i‖
        return fedfv_weights(gram, shares, self._losses, self.alpha, self._ranks)

    def server_step(self, update: ReducedUpdate) -> Tensor:
        """Returns the step without conflicts, shape (d,), and keeps the round's updates."""
        self._losses = update.losses.numpy()
        self._ranks = value_order(update.updates).argsort().cpu().numpy()  # equal losses do not go by ids
        step = super().server_step(update)
        step = step.to(wide_dtype(step))
        present = {client.id for client in update.clients}
        absent = [(at, row) for client, (at, row) in sorted(self.former.items()) if client not in present]
        for former in range(update.round - self.tau, update.round):
            step = without_conflicts(step, [row for at, row in absent if at == former])
        length = float(torch.linalg.vector_norm(step))
        # What is left of updates that cancel is only their rounding, and is not made as long as Δ.
        rounding = 16 * torch.finfo(update.updates.dtype).eps * float(self.step_weights.abs().numpy() @ self._lengths)
        if self.tau:
            rows = zip(update.clients, update.updates, strict=True)
            self.former.update({client.id: (update.round, row.clone()) for client, row in rows})
            self.former = {client: kept for client, kept in self.former.items() if kept[0] > update.round - self.tau}
        return (step * (self._square**0.5 / length if length > rounding else 0.0)).to(update.updates.dtype)

    def state_dict(self) -> dict[str, Any]:
        return {"former": {client: (at, row.clone()) for client, (at, row) in self.former.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.former = dict(state_dict["former"])


class FedMGDA(CombiningAggregator):
    """Adds the shortest mean of the updates' directions: w <- w + η_g Σ λ_i δ_i / ‖δ_i‖; see ``mgda_weights``.

    FedMGDA+ of Hu, Shaloudegi, Zhang, Yu, "Federated Learning Meets Multi-objective Optimization", 2020,
    arXiv:2006.11489. Before η_g the step is at most 1 long, whatever the clients' learning rate. ε = 0 is the mean of
    the directions.

    Args:
        epsilon: ε in [0, 1], how far λ_i may be from p_i; 1 means no bound.
        lr: η_g, above 0: the farthest that the model moves in a round.
        **kwargs: Options of every aggregator.
    """

    def __init__(self, epsilon: float = 0.1, lr: ByRound = 1.0, **kwargs: Any) -> None:
        super().__init__(lr=lr, **kwargs)
        self.epsilon = expect_number("--aggregator.epsilon", epsilon, least=0, most=1)

    def combine(self, gram: Array, shares: Array, round: int) -> Array:
        return mgda_weights(gram, shares, self.epsilon)


class FedOMG(CombiningAggregator):
    """Adds the step near the mean that is best for the client that gains least: u = Δ + κ ‖Δ‖ g_γ / ‖g_γ‖.

    g_γ = Σ γ_i δ_i, γ = argmin ⟨g_γ, Δ⟩ + κ ‖Δ‖ ‖g_γ‖ over the simplex; see ``cagrad_weights``. Nguyen et al.,
    "Federated Domain Generalization with Data-free On-server Matching Gradient", ICLR 2025: CAGrad (Liu et al., NeurIPS
    2021, section 3.2) on updates. κ = 0 is FedAvg, up to rounding.

    Args:
        kappa: κ in [0, 1): the step's distance from Δ, in units of ‖Δ‖.
        **kwargs: Options of every aggregator.
    """

    def __init__(self, kappa: float = 0.5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kappa = expect_number("--aggregator.kappa", kappa, least=0, below=1)

    def combine(self, gram: Array, shares: Array, round: int) -> Array:
        return cagrad_weights(gram, shares, self.kappa)


class FedGaLAServer(Aggregator):
    """Weighs clients, tensor by tensor, by how far they go the way of all: u = Σ ω_i δ_i, ω_i ∝ 1 + cos(p_i δ_i, a).

    a is the mean of the p_i δ_i, then their sum with these ω_i, ``iterations`` times; see ``alignment_weights``.
    Pourpanah, Molahasani, Soltany, Greenspan, Etemad, "Federated Unsupervised Domain Generalization Using Global and
    Local Alignment of Gradients", AAAI 2025: global alignment, with the constants of the authors' code. Its client half
    is ``FedGaLA``. The p_i turn a alone. ``mix`` 1, or no iteration, is FedAvg with uniform weights, up to rounding.

    Args:
        iterations: Times that ω is computed, at least 0.
        mix: γ in [0, 1], the share of equal weights.
        **kwargs: Options of every aggregator.
    """

    needs = Need.UPDATES

    def __init__(self, iterations: int = 3, mix: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.iterations = expect_count("--aggregator.iterations", iterations, least=0)
        self.mix = expect_number("--aggregator.mix", mix, least=0, most=1)

    def step(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        self._sizes = [p.numel() for p in trainer.vector.parameters]
        super().step(trainer, pl_module, update)

    def server_step(self, update: ReducedUpdate) -> Tensor:
        parts, shares = list[Tensor](), update.weights.numpy()
        for rows in torch.split(update.updates, self._sizes, dim=1):
            weights = alignment_weights(gram_matrix(rows).cpu().double().numpy(), shares, self.iterations, self.mix)
            parts.append(combine_rows(rows, torch.from_numpy(weights).to(rows.device, wide_dtype(rows))).to(rows.dtype))
        return torch.cat(parts)


class FedAWA(CombiningAggregator):
    """Learns clients' weights round by round: w <- w + η_g Σ λ_i δ_i, λ lower in Σ λ_i (‖δ_i - Σ λ_j δ_j‖ + d(w, w_i)).

    d = 1 - cos. Shi, Zhao, Zhang, Zhou, Guo, Chang, "FedAWA: Adaptive Optimization of Aggregation Weights in Federated
    Learning Using Client Vectors", CVPR 2025. λ_i ∝ p_i exp(b_i); in each round Adam takes ``steps`` on the b_i of its
    clients, which are 0 at first and kept from round to round; see ``fedawa_offsets``. No steps are FedAvg, up to
    rounding.

    Args:
        steps: Steps of Adam in a round, at least 0.
        rate: Their learning rate, above 0.
        **kwargs: Options of every aggregator.

    Attributes:
        offsets: b_i by client id.
    """

    def __init__(self, steps: int = 1, rate: float = 0.001, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.steps = expect_count("--aggregator.steps", steps, least=0)
        self.rate = expect_number("--aggregator.rate", rate, above=0)
        self.offsets: dict[int, float] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self.offsets = {}

    def step(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        self._clients, wide = [client.id for client in update.clients], wide_dtype(trainer.weights)
        weights = trainer.weights.to(wide)
        along = torch.stack([torch.dot(weights, row.to(wide)) for row in update.updates])
        self._along, self._square = along.cpu().double().numpy(), float(torch.dot(weights, weights))
        super().step(trainer, pl_module, update)

    def combine(self, gram: Array, shares: Array, round: int) -> Array:
        lengths = np.sqrt(self._square * np.maximum(self._square + 2 * self._along + gram.diagonal(), 0.0))
        cosines = np.divide(self._square + self._along, lengths, out=np.zeros(len(gram)), where=lengths > 0)
        start = np.array([self.offsets.get(client, 0.0) for client in self._clients])
        offsets = fedawa_offsets(gram, shares, 1 - cosines, start, self.steps, self.rate)
        self.offsets.update(zip(self._clients, offsets.tolist(), strict=True))
        return term_weights(offsets, shares, 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"offsets": dict(self.offsets)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.offsets = dict(state_dict["offsets"])
