"""FedCM: local steps along a mean of the client's gradient and the last round's direction."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.reduction import LongSum
from lightning_fed.core.updates import Cohort, ReducedUpdate, Update
from lightning_fed.errors import expect_number
from lightning_fed.functional.fednova import optimizer_distance
from lightning_fed.functional.local import difference

__all__ = ["FedCM"]


class FedCM(ClientAlgorithm):
    """Makes of every local gradient g <- α g + (1 - α) m, m the mean direction of the last round's local steps.

    Xu, Wang, Wang, Yao, "FedCM: Federated Learning with Client-level Momentum", 2021, arXiv:2106.10874, Algorithm 1.
    m = -Σ p_i δ_i / a_i with the a_i of the client's own steps, K_i η for plain SGD; momentum and schedules are
    simulated exactly, see ``sgd_distance``. Before the first round m = 0. Terms of other algorithms are added after it,
    whatever their names: they are not scaled, and FedProx's pull is no part of m. α = 1 is plain local training, bit
    for bit.

    Args:
        alpha: α in (0, 1]. The paper takes 0.1.

    Attributes:
        momentum: m, shape (d,), None before the first round.
    """

    stacks = True
    needs_distance = True
    adds_linear_term = True
    scales_gradient = True
    vectors_down = 1

    def __init__(self, alpha: float = 0.1) -> None:
        expect_number("--client.alpha", alpha, above=0, most=1, of="FedCM")
        self.alpha = alpha
        self.momentum: Tensor | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forgets m of a former ``fit``."""
        if stage == "fit":
            self.momentum = None

    def check(self, trainer: TrainerLike) -> None:
        """Refuses any client optimizer but SGD, whose distance is known, and a client's own linear term beside it."""
        super().check(trainer)
        self.expect_no_linear_term(trainer, "whose terms would become part of m as if they were the clients' gradients")
        optimizer_distance(trainer.optimizers[0], [], asked_by="--client")

    def on_round_start(self, trainer: TrainerLike, pl_module: LightningModule, cohort: Cohort) -> None:
        """Gets m ready, which changes only when the round is over."""
        if self.momentum is None:
            self.momentum = torch.zeros_like(trainer.weights)
        self.momentum = self.momentum.to(trainer.weights)
        self._sum = LongSum(torch.zeros_like(self.momentum))

    def on_before_optimizer_step(self, trainer: TrainerLike, pl_module: LightningModule, optimizer: Any) -> None:  # type: ignore[override]  # our trainer stands in
        """Scales the gradient, then adds the momentum."""
        assert self.momentum is not None
        if self.alpha < 1:
            trainer.vector.scale_gradient(self.alpha)
            trainer.vector.add_to_gradient(self.momentum, alpha=1 - self.alpha)

    def on_client_entered(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        """Adds -δ_i / a_i, weighted: what local steps moved, whatever others have made of the update since."""
        moved = difference(trainer.vector.data, trainer.origin, self.scratch("moved", trainer.weights))
        self._sum.add(moved, -trainer.update_weight(update.client) / update.distance)

    def on_after_server_step(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        """Makes of the round's steps the next m, over the clients of all processes."""
        total = trainer.reduce_sum(self._sum.close())
        if whole := sum(trainer.update_weight(client) for client in update.clients):
            self.momentum = total.div_(whole)

    def state_dict(self) -> dict[str, Any]:
        """Returns m."""
        return {} if self.momentum is None else {"momentum": self.momentum.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        self.momentum = state_dict.get("momentum")
