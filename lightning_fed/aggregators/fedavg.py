"""Federated averaging, its form for clients that take different numbers of steps, and one that shrinks layers."""

from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.aggregators.base import Aggregator
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import Need, ReducedUpdate
from lightning_fed.errors import expect_number
from lightning_fed.functional.clients import optimizer_distance
from lightning_fed.functional.server import fedlws_shrinking

__all__ = ["FedAvg", "FedLWS", "FedNova"]


class FedAvg(Aggregator):
    """Adds the weighted mean of the updates: w <- w + η_g Σ p_i δ_i (McMahan et al., AISTATS 2017, Algorithm 1).

    With ``lr`` 1 and no mask the new model is the weighted mean of the clients' models. With a mask it is gradient
    masked averaging (Tenison et al., TMLR 2023).
    """

    def server_step(self, update: ReducedUpdate) -> Tensor:
        return update.mean


class FedNova(Aggregator):
    """Averages updates per unit of distance: w <- w + η_g (Σ p_i a_i) Σ p_i δ_i / a_i.

    Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS 2020,
    eq. 6 and Algorithm 1. a_i is how far client i's optimizer moves a scalar whose gradient is always 1 in its K_i
    steps (K_i times the learning rate for plain SGD). So a client with more steps has no more influence. Equal a_i give
    FedAvg, up to rounding. Only SGD has such a distance; other optimizers are refused.
    """

    needs = Need.NORMALIZED_MEAN

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuses, before the first round, an optimizer that has no such distance."""
        # A module that optimizes by itself is refused at its first step, with the reason.
        for optimizer in trainer.optimizers if pl_module.automatic_optimization else ():
            optimizer_distance(optimizer, [])

    def server_step(self, update: ReducedUpdate) -> Tensor:
        return update.normalized_mean * update.mean_distance


class FedLWS(Aggregator):
    """Shrinks each layer of the mean model, the more the clients differ in it: w_l <- γ_l (w_l + Δ_l).

    γ_l = ‖w_l‖ / (‖w_l‖ + τ_l ‖Δ_l‖), τ_l = β (1/n) Σ ‖δ_i,l - δ̄_l‖, kept within ``tau_min`` and ``tau_max``, δ̄ the
    unweighted mean. Shi, Li, Zhao, Guo, Chang, "FedLWS: Federated Learning with Adaptive Layer-wise Weight Shrinking",
    ICLR 2025, with the constants of the authors' code. A layer is what one module holds; one that is 0 is not shrunk.
    Where τ is 0, as with ``tau_max`` 0, it is FedAvg, bit for bit. It holds all updates of the cohort, shape (n, d).

    Args:
        beta: β, at least 0, in 1 / units of the weights.
        tau_min: The least τ, at least 0.
        tau_max: The greatest τ, at least ``tau_min``.
        **kwargs: Options of every aggregator; η_g multiplies the whole step, shrinking too.

    Attributes:
        layers: Where each layer lies in the flat vector; empty before the first round.
    """

    needs = Need.MEAN | Need.UPDATES

    def __init__(self, beta: float = 0.03, tau_min: float = 0.01, tau_max: float = 0.2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.beta = expect_number("--aggregator.beta", beta, least=0)
        least = expect_number("--aggregator.tau_min", tau_min, least=0)
        self.bounds = least, expect_number("--aggregator.tau_max", tau_max, least=least)
        self.layers: list[slice] = []

    def step(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        vector = trainer.vector
        owners = [name.rpartition(".")[0] or name for name in vector.names]
        held = groupby(zip(owners, vector.parameters, strict=True), key=itemgetter(0))
        ends = accumulate((sum(p.numel() for _, p in own) for _, own in held), initial=0)
        self.layers, self._weights = [slice(*place) for place in pairwise(ends)], trainer.weights
        super().step(trainer, pl_module, update)
        pl_module.log_dict({"fedlws/least": self._kept.min(), "fedlws/mean": self._kept.mean()})

    def server_step(self, update: ReducedUpdate) -> Tensor:
        step, shrunk = update.mean.clone(), list[Tensor]()
        for at in self.layers:
            weights, mean = self._weights[at], update.mean[at]
            shrunk.append(fedlws_shrinking(weights, mean, update.updates[:, at], self.beta, self.bounds))
            step[at] -= (shrunk[-1] * (weights + mean)).to(step.dtype)
        self._kept = 1 - torch.stack(shrunk)
        return step
