"""FedSAM: local steps along the gradient at the worst point close by."""

from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.errors import expect_number

__all__ = ["FedSAM"]


class FedSAM(ClientAlgorithm):
    """Takes every local gradient uphill of the weights: g = ∇f(w_i + ρ ∇f(w_i) / ‖∇f(w_i)‖), both on one batch.

    Qu, Li, Duan, Liu, Tang, Lu, "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022, Algorithm
    1, FedSAM. Terms of other algorithms are added to g, not to the gradient that it climbs by; with FedCM, which scales
    g, it is MoFedSAM. ρ = 0 is plain local training, bit for bit, and takes no second gradient.

    Args:
        rho: ρ of at least 0, in units of the weights.
    """

    stacks = True
    replaces_gradient = True

    def __init__(self, rho: float = 0.05) -> None:
        self.rho = expect_number("--client.rho", rho, least=0, of="FedSAM")
        self.takes_second_gradient = rho > 0

    def on_before_optimizer_step(self, trainer: TrainerLike, pl_module: LightningModule, optimizer: Any) -> None:  # type: ignore[override]  # our trainer stands in
        if not self.rho:
            return
        vector, point = trainer.vector, self.scratch("point", trainer.weights)
        point.copy_(vector.grad)
        norm, limits = torch.linalg.vector_norm(point, dim=-1, keepdim=True), torch.finfo(point.dtype)
        factor = (self.rho / norm.clamp_min(limits.tiny)).clamp_max(limits.max)  # finite: times a gradient of 0 it is 0
        point.mul_(factor).add_(vector.data)
        trainer.gradient_at(point, point)
        vector.grad.copy_(point)
