"""Federated averaging, and its form for clients that take different numbers of steps."""

from typing import Any

from torch import Tensor

from lightning_fed.aggregators.base import Aggregator
from lightning_fed.core.updates import Need, ReducedUpdate
from lightning_fed.functional.fednova import optimizer_distance

__all__ = ["FedAvg", "FedNova"]


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
