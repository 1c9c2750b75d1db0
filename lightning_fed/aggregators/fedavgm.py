"""Federated averaging with server momentum, and clients that start ahead along the momentum."""

from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.aggregators.base import StatefulAggregator
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import Client, Cohort, ReducedUpdate
from lightning_fed.errors import expect_number
from lightning_fed.functional.server import fedavgm_step

__all__ = ["FedACG", "FedAvgM"]


class FedAvgM(StatefulAggregator):
    """Adds a momentum of the updates: m <- β m + Δ; w <- w + η_g m (Hsu, Qi and Brown, 2019, arXiv:1909.06335).

    β = 0 is FedAvg, bit for bit. The steps of a constant Δ grow to 1 / (1 - β) times its length.

    Args:
        beta: β in [0, 1).
        **kwargs: Options of every aggregator.
    """

    def __init__(self, beta: float = 0.9, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.beta = expect_number("--aggregator.beta", beta, least=0, below=1)

    def server_step(self, update: ReducedUpdate) -> Tensor:
        momentum = self.recall("momentum", update.mean)
        step, self.vectors["momentum"] = fedavgm_step(update.mean, momentum, self.beta)
        return step


class FedACG(FedAvgM):
    """FedAvgM whose clients start ahead, at w + η_g β m; their updates are measured from there.

    Kim, Kim, Han, "Communication-Efficient Federated Learning with Accelerated Client Gradient", CVPR 2024, whose λ is
    β here. For the paper's pull of clients to their start add the client algorithm ``FedProx``; its μ is the paper's β.
    Without momentum (in the first round, or with β = 0) clients start at w, and it is FedAvg, bit for bit.

    Args:
        beta: β in [0, 1), the paper's λ.
        **kwargs: Options of every aggregator.
    """

    stacks = True

    def __init__(self, beta: float = 0.85, **kwargs: Any) -> None:
        super().__init__(beta, **kwargs)

    def on_round_start(self, trainer: TrainerLike, pl_module: LightningModule, cohort: Cohort) -> None:
        share = self.lr_at(cohort.round) * self.beta
        self.ahead = self.recall("momentum", trainer.weights) * share if share and self.vectors else None

    def on_client_start(self, trainer: TrainerLike, pl_module: LightningModule, client: Client) -> None:
        """Moves the client's start ahead, also if a client algorithm has displaced it."""
        if self.ahead is not None:
            trainer.origin = trainer.vector.data.add_(self.ahead).clone()
