"""Corrective gradient weights: how much of each client's gradient to subtract from the averaged model."""

from typing import Literal

import torch
from torch import Tensor

from lightning_fed.errors import FederatedError

__all__ = ["corrective_weights", "products_with_sum", "weighted_gradients"]


def corrective_weights(
    gram: Tensor, losses: Tensor, alpha: float, constraint: Literal["per_client", "shared"] = "per_client"
) -> Tensor:
    """Computes x_i, the weight of each client's gradient D_i in the correction w <- FedAvg - Σ x_i D_i of ``CGW``.

    With D = Σ D_j, m_i = ⟨D_i, D⟩ and c = min_i α L_i / ‖D_i‖ (eq. 13): ``per_client`` is
    x_i = c (m_i / ‖D_i‖²) / sqrt(Σ_j (m_j / ‖D_j‖)²) (eq. 29), ``shared`` is x_i = c / ‖D‖ (eq. 23). A client whose D_i
    is zero, or whose D_i or L_i is not finite, gets 0 and is left out of D, of c and of the root. If the root or D is
    zero (to rounding), all weights are 0.

    Source: Mousazadeh, Khodadadi, Salehi, "A Novel Approach for Improving Generalization in Federated Learning Through
    Corrective Gradient Weights", 2023.

    ``gram`` is ⟨D_i, D_j⟩, shape (n, n), float64; ``losses`` are L_i where D_i was taken, shape (n,), like the result.

    Raises:
        FederatedError: If a loss is negative: the paper's bound is a share of the loss.
    """
    losses = losses.to(gram)
    enters, products = products_with_sum(gram, losses)
    squares = gram.diagonal()
    weights = torch.zeros_like(squares)
    if not enters.any():
        return weights
    if (losses[enters] < 0).any():
        raise FederatedError(
            f"Expected losses of at least 0 for corrective gradient weights, got {losses[enters].min().item():.4g}: "
            "change the loss of the model, or choose another `--aggregator`."
        )
    squares, products = squares[enters], products[enters]
    bound = alpha * (losses[enters] / squares.sqrt()).min()
    root = products.square().div(squares).sum().sqrt()
    length = products.sum().clamp(min=0).sqrt()  # ‖D‖
    if root > 0 and length > 0:
        weights[enters] = bound * (products / squares) / root if constraint == "per_client" else bound / length
    return weights


def products_with_sum(gram: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
    """Computes m_i = ⟨D_i, D⟩, where D sums over the clients that enter; arguments are those of ``corrective_weights``.

    Returns which clients enter, shape (n,), bool: D_i is finite and not zero, and L_i is finite; and m_i, shape (n,),
    0 for the others, and 0 if it is only rounding, which the weights would blow up to full size.
    """
    squares = gram.diagonal()
    enters = (squares > 0) & squares.isfinite() & losses.to(gram).isfinite()
    entered = gram[enters][:, enters]
    rounding = torch.finfo(gram.dtype).eps * len(entered) * entered.abs().sum(dim=1)
    sums = entered.sum(dim=1)
    products = torch.zeros_like(squares)
    products[enters] = sums.masked_fill(sums.abs() <= rounding, 0.0)
    return enters, products


def weighted_gradients(gradients: Tensor, weights: Tensor) -> Tensor:
    """Computes Σ x_i D_i, shape (d,), over the clients whose weight is not zero, in ascending order.

    D_i are the rows of ``gradients``, shape (n, d), in its dtype; one that is not finite must have weight 0.
    """
    total = gradients.new_zeros(gradients.shape[1])
    for row, weight in zip(gradients, weights.tolist(), strict=True):
        if weight != 0:
            total.add_(row, alpha=weight)
    return total
