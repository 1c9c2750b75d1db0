"""FedCM: local steps along a mean of the client's gradient and the last round's direction."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import Cohort, ReducedUpdate, Update
from lightning_fed.errors import expect_number
from lightning_fed.functional.fednova import optimizer_distance
from lightning_fed.functional.local import difference

__all__ = ["FedCM", "MomentumAlgorithm"]


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
