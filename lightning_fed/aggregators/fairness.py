"""Rules that weigh clients by their losses."""

import math
from abc import abstractmethod
from typing import Any, Literal, cast

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.aggregators.base import Aggregator, StatefulAggregator
from lightning_fed.aggregators.feddg_ga import FedDGGA as FedDGGA  # which was here
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import Client, Cohort, Need, ReducedUpdate, Update
from lightning_fed.errors import expect, expect_number
from lightning_fed.functional.geometry import wide_dtype
from lightning_fed.functional.server import project_onto_simplex

__all__ = ["AFL", "TERM", "LossWeightingAggregator", "QFedAvg"]

# What clients send, with the exponent that they have taken out of it.
_ABOVE, _BELOW = "loss-weighted update / e^", "loss weight / e^"
# Smaller losses count as this one, because powers can be below 0.
_LEAST = 1e-10


class LossWeightingAggregator(Aggregator):
    """The base of rules that step by Σ p_i e^{a_i} δ_i / Σ p_i e^{a_i} b_i, with a_i from the client's own loss f_i(w).

    Both are sums over clients, so the server need see no single update and no loss. Clients take out of e^{a_i} the
    multiple of e^64 that is next to it, so that nothing overflows, and say which: for |a_i| below 32 it is 1. What
    shares a multiple is added up. Each client's loss costs a forward pass over its data.

    Attributes:
        step_weights: c_i of the last round's step Σ c_i δ_i, shape (n,), float64, on the CPU; empty before the first,
            and where the server sees sums alone.
    """

    needs = Need.OWN_LOSS
    stacks = True
    step_weights: Tensor = torch.empty(0, dtype=torch.float64)

    @abstractmethod
    def exponent(self, loss: float) -> float:
        """Computes a_i from f_i(w)."""

    def share(self, loss: float, delta: Tensor) -> Tensor:
        """Computes b_i, shape (), in wide precision, from f_i(w) and δ_i, shape (d,): 1, by which the c_i sum to 1."""
        return delta.new_ones((), dtype=wide_dtype(delta))

    def on_client_end(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        """Sends the update with its factor in place of the update: aggregators are called last."""
        loss = float(cast(Tensor, update.loss))
        exponent = self.exponent(loss)
        base = 64 * float(np.rint(exponent / 64)) + 0.0  # no -0.0, which has another name
        factor = update.weight * math.exp(exponent - base)
        update.send(f"{_ABOVE}{base:.0f}", update.delta, factor, implied=True)
        update.send(f"{_BELOW}{base:.0f}", self.share(loss, update.delta), factor)

    def server_step(self, update: ReducedUpdate) -> Tensor:
        ends = sorted((name.removeprefix(_BELOW) for name in update.sums if name.startswith(_BELOW)), key=float)
        scales = {end: math.exp(float(end) - float(ends[-1])) for end in ends}  # in one order on every process
        below = sum(scale * float(update.sums[_BELOW + end]) for end, scale in scales.items())
        above = sum((update.sums[_ABOVE + end] * scale for end, scale in scales.items()), start=torch.zeros(()))
        known = zip(update.clients, update.losses.tolist(), strict=False)
        factors = [self.client_weight(each) * math.exp(self.exponent(loss) - float(ends[-1])) for each, loss in known]
        self.step_weights = torch.tensor(factors, dtype=torch.float64) / below
        return above.div_(below)

    def client_figures(self) -> dict[str, Tensor]:
        return {"step_weight": self.step_weights}


class QFedAvg(LossWeightingAggregator):
    """Weighs clients by f_i^q: w <- w + η_g Σ p_i f_i^q L δ_i / Σ p_i (q f_i^{q-1} L² ‖δ_i‖² + L f_i^q).

    Li, Sanjabi, Beirami, Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020, Algorithm 2, with
    p_i = 1/n. f_i is the client's mean loss at w, the global model that the round starts from. q = 0 is FedAvg, bit
    for bit. A larger q gives clients with large losses more weight, and makes the step shorter.

    Args:
        q: At least 0.
        lipschitz: L, above 0: how fast the gradients change. None means 1/η for the clients' learning rate η.
        weighting: p_i before normalisation: 1 (``uniform``, the paper) or s_i (``samples``).
        **kwargs: Options of every aggregator.
    """

    def __init__(
        self,
        q: float = 1.0,
        lipschitz: float | None = None,
        weighting: Literal["samples", "uniform"] = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(weighting=weighting, **kwargs)
        self.q = expect_number("--aggregator.q", q, least=0)
        self.lipschitz = expect_number("--aggregator.lipschitz", lipschitz, above=0, optional=True)
        self._rate = 0.0

    def on_round_start(self, trainer: TrainerLike, pl_module: LightningModule, cohort: Cohort) -> None:
        if self.lipschitz is None:
            self._rate = float(trainer.optimizers[0].param_groups[0]["lr"])
            expect(
                self._rate > 0,
                "Expected `--aggregator.lipschitz` to be set, because its default is 1 over the clients' learning "
                f"rate and that is {self._rate:g}, got null: set it, or a learning rate above 0.",
            )

    def exponent(self, loss: float) -> float:
        expect(
            not loss < 0,
            "Expected losses of at least 0 for QFedAvg, which raises them to the power `--aggregator.q`, got "
            f"{loss:.3g}: return a loss that is not negative, or give `--aggregator TERM`.",
        )
        return self.q * math.log(max(loss, _LEAST))

    def share(self, loss: float, delta: Tensor) -> Tensor:
        square: Tensor = torch.linalg.vector_norm(delta, dtype=wide_dtype(delta)).square()
        return square * (self.q * (self.lipschitz or 1 / self._rate) / max(loss, _LEAST)) + 1


class TERM(LossWeightingAggregator):
    """Tilts the mean towards clients with larger losses: w <- w + η_g Σ c_i δ_i with c_i ∝ p_i e^{t f_i}.

    Li, Beirami, Sanjabi, Smith, "Tilted Empirical Risk Minimization", ICLR 2021, Lemma 1, tilted over clients: the
    gradient of (1/t) log Σ p_i e^{t f_i}. f_i is the client's mean loss at w. t = 0 is FedAvg, bit for bit. t below
    0 gives clients with larger losses less weight, as if they were outliers.

    Args:
        t: Any finite number.
        **kwargs: Options of every aggregator.
    """

    def __init__(self, t: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.t = expect_number("--aggregator.t", t)

    def exponent(self, loss: float) -> float:
        return self.t * loss


class AFL(StatefulAggregator):
    """Trains for the worst mixture of clients: w <- w + η_g Σ λ_i δ_i, then λ <- Π(λ + γ f) with f_i = f_i(w).

    Mohri, Sivek, Suresh, "Agnostic Federated Learning", ICML 2019, Algorithm 1 with updates of local training
    instead of gradients. Π projects onto the simplex over all clients that hold samples. All of them are drawn in every
    round; one that is late or diverges gets no ascent step on its λ_i. γ = 0 is FedAvg, up to rounding.

    Args:
        gamma: γ, at least 0, in units of 1 / loss.
        weighting: λ before the first round: 1/N (``uniform``) or in proportion to s_i (``samples``).
        **kwargs: Options of every aggregator.
    """

    needs = Need.MEAN | Need.LOSSES

    def __init__(self, gamma: float = 0.1, weighting: Literal["samples", "uniform"] = "uniform", **kwargs: Any) -> None:
        super().__init__(weighting=weighting, **kwargs)
        self.gamma = expect_number("--aggregator.gamma", gamma, least=0)
        self._whole = 0.0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._whole = 0.0

    @property
    def mixture(self) -> Tensor | None:
        """λ by client id, shape (N,), float64, on the CPU; None before the first round."""
        return self.vectors.get("mixture")

    def on_round_start(self, trainer: TrainerLike, pl_module: LightningModule, cohort: Cohort) -> None:
        """Initialises λ, and refuses a cohort without all clients, except under ``fast_dev_run``."""
        sizes = np.asarray(trainer.client_sizes)
        self._holders = np.flatnonzero(sizes)
        drawn = len(cohort.clients) + len(set(cohort.skipped) & set(self._holders.tolist()))
        expect(
            drawn >= len(self._holders) or getattr(trainer, "fast_dev_run", False),
            f"Expected all {len(self._holders)} clients in every round of AFL, as λ covers all of them, got {drawn}: "
            "leave out `--trainer.clients_per_round`.",
        )
        shares = sizes.astype(float) if self.weighting == "samples" else (sizes > 0).astype(float)
        self._whole = float(shares.sum())
        self.vectors.setdefault("mixture", torch.from_numpy(shares / self._whole))

    def client_weight(self, client: Client) -> float:
        """Returns λ_i, scaled so that all clients' weights sum to the same as before the first round."""
        if self.mixture is None or not self._whole:  # no round of this fit has begun
            return super().client_weight(client)
        return float(self.mixture[client.id]) * self._whole

    def server_step(self, update: ReducedUpdate) -> Tensor:
        assert self.mixture is not None
        point = self.mixture.clone()
        point[[client.id for client in update.clients]] += self.gamma * update.losses
        projected = torch.zeros_like(point)
        projected[self._holders] = torch.from_numpy(project_onto_simplex(point[self._holders].numpy()))
        self.vectors["mixture"] = projected
        return update.mean
