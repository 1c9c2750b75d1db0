"""Federated averaging."""

from torch import Tensor

from lightning_fed.aggregators.base import Aggregator
from lightning_fed.core.updates import ReducedUpdate

__all__ = ["FedAvg"]


class FedAvg(Aggregator):
    """Adds the weighted mean of the updates: w <- w + η_g Σ p_i δ_i (McMahan et al., AISTATS 2017, Algorithm 1).

    With ``lr`` 1 and no mask the new model is the weighted mean of the clients' models. With a mask it is gradient
    masked averaging (Tenison et al., TMLR 2023).
    """

    def server_step(self, update: ReducedUpdate) -> Tensor:
        """Returns Δ = Σ p_i δ_i, shape (d,)."""
        return update.mean
