"""Federated averaging with server momentum."""

from typing import Any

from torch import Tensor

from lightning_fed.aggregators.stateful import StatefulAggregator
from lightning_fed.core.updates import ReducedUpdate
from lightning_fed.errors import expect_number
from lightning_fed.functional.server import fedavgm_step

__all__ = ["FedAvgM"]


class FedAvgM(StatefulAggregator):
    """Adds a momentum of the updates: m <- β m + Δ; w <- w + η_g m (Hsu, Qi and Brown, 2019, arXiv:1909.06335).

    β = 0 is FedAvg, bit for bit. A steady Δ is stepped by 1 / (1 - β) times its length.

    Args:
        beta: β in [0, 1).
        **kwargs: Options of every aggregator.
    """

    def __init__(self, beta: float = 0.9, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        expect_number("--aggregator.beta", beta, least=0, below=1)
        self.beta = beta

    def server_step(self, update: ReducedUpdate) -> Tensor:
        """Returns m, shape (d,)."""
        momentum = self.recall("momentum", update.mean)
        step, self.vectors["momentum"] = fedavgm_step(update.mean, momentum, self.beta)
        return step
