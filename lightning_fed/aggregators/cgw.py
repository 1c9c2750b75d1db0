"""Corrective gradient weights on top of federated averaging."""

from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.aggregators.base import Aggregator
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import Need, ReducedUpdate
from lightning_fed.errors import expect_choice, expect_number
from lightning_fed.functional.geometry import gram_matrix
from lightning_fed.functional.server import corrective_weights, products_with_sum, weighted_gradients

__all__ = ["CGW"]


class CGW(Aggregator):
    """Subtracts a weighted sum of the clients' gradients from the averaged model: w <- w + η_g Δ - Σ x_i D_i.

    D_i is the gradient and L_i the loss of client i at its own model, over its full data. x_i grows with ⟨D_i, Σ D_j⟩,
    so a client that pulls against the others gets a negative weight (Mousazadeh, Khodadadi, Salehi, 2023, eq. 8, 23 and
    29; see ``corrective_weights``). α = 0 is FedAvg, bit for bit. A mask multiplies the whole step.

    Args:
        alpha: α, at least 0 (in the paper at most 1). Under ``shared`` each client's loss may change by at most this
            share of it, to first order. Under ``per_client`` it only scales the correction.
        constraint: ``per_client`` bounds Σ x_i² ‖D_i‖² (eq. 24); ``shared`` bounds the correction itself (eq. 15) and
            gives all clients the same weight.
        **kwargs: Options of every aggregator.

    Attributes:
        corrective_weights: x_i of the last round, shape (n,), float64, on the CPU; empty if α = 0.
    """

    needs = Need.MEAN | Need.GRADIENTS
    gradient_at: Literal["start", "end", "last_step"] = "end"

    def __init__(
        self, alpha: float = 0.1, constraint: Literal["per_client", "shared"] = "per_client", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.alpha = expect_number("--aggregator.alpha", alpha, least=0)
        self.constraint: Literal["per_client", "shared"] = expect_choice(
            "--aggregator.constraint", constraint, ("per_client", "shared")
        )
        self.corrective_weights = self._losses = torch.empty(0, dtype=torch.float64)
        self._gram = torch.empty(0, 0, dtype=torch.float64)

    def server_step(self, update: ReducedUpdate) -> Tensor:
        """Returns Δ - (1/η_g) Σ x_i D_i, shape (d,): η_g scales only Δ."""
        if self.alpha == 0:
            return update.mean
        self._gram = gram_matrix(update.gradients).cpu()  # copied once: the code below reads single numbers
        self._losses = update.losses
        self.corrective_weights = corrective_weights(self._gram, update.losses, self.alpha, self.constraint)
        correction = weighted_gradients(update.gradients, self.corrective_weights)
        return torch.sub(update.mean, correction, alpha=1 / self.lr_at(update.round))

    def client_figures(self) -> dict[str, Tensor]:
        """Returns x_i, m_i = ⟨D_i, D⟩ and the sign of x_i of the last round; empty if α = 0."""
        weights, products = self.corrective_weights, products_with_sum(self._gram, self._losses)[1]
        return {"cgw_weight": weights, "cgw_product": products, "cgw_sign": weights.sign()}

    def step(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        super().step(trainer, pl_module, update)
        weights = self.corrective_weights
        if len(weights):
            pl_module.log_dict({"cgw/negative": (weights < 0).sum(), "cgw/zero": (weights == 0).sum()})
