"""What the server computes: the step of the global vector, and the weights of clients.

Every step returns u, before mask and server learning rate, and then the new server state, each of shape (d,) in the
dtype of ``mean``; its arguments are left as they are. ``mean`` is the pseudo-gradient Δ = Σ p_i δ_i with δ_i = w_i - w,
in the server's direction of travel. Weights of clients, by their losses or against their gradients, are arrays or
tensors of shape (n,). The aggregators' docstrings have the equations, and their sources.
"""

from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_fed.errors import FederatedError
from lightning_fed.functional.geometry import wide_dtype

__all__ = [
    "adjusted_weights", "corrective_weights", "fedadagrad_step", "fedadam_step", "fedavgm_step", "feddyn_step",
    "fedexp_factor", "fedlws_shrinking", "fedyogi_step", "products_with_sum", "project_onto_simplex",
    "term_weights", "weighted_gradients",
]  # fmt: skip

Array: TypeAlias = npt.NDArray[np.float64]

# Gaps that differ by no more than this share of the largest are equal.
_EQUAL = 1e-12


def fedexp_factor(mean: Tensor, mean_square: Tensor, epsilon: float) -> Tensor:
    """Computes the factor max(1, Σ p_i ‖δ_i‖² / (2 (‖Δ‖² + ε))) of ``FedExP``, shape (), in double precision.

    It is 1 where ε is 0 and Δ too, or what is left of updates that cancel but for their rounding. ``mean_square`` is
    Σ p_i ‖δ_i‖².
    """
    below = 2 * (torch.linalg.vector_norm(mean, dtype=wide_dtype(mean)).square() + epsilon)
    hidden = 2 * (16 * torch.finfo(mean.dtype).eps) ** 2 * mean_square
    return torch.where(below > hidden, mean_square / below, 1.0).clamp(min=1.0)


def fedlws_shrinking(
    weights: Tensor, mean: Tensor, updates: Tensor, beta: float, bounds: tuple[float, float]
) -> Tensor:
    """Computes 1 - γ of a layer of ``FedLWS``, shape (), in double precision, in [0, 1); 0 where the layer is 0.

    ``weights`` and ``mean`` are the layer's w and Δ, shape (d_l,), ``updates`` its δ_i, shape (n, d_l).
    """
    wide = wide_dtype(updates)
    center = updates.mean(dim=0, dtype=wide)
    spread = torch.stack([torch.linalg.vector_norm(row - center) for row in updates]).mean()
    length, step = torch.linalg.vector_norm(weights, dtype=wide), torch.linalg.vector_norm(mean, dtype=wide)
    pull = (beta * spread).clamp(*bounds) * step
    return torch.where((length > 0) & (pull > 0), pull / (length + pull), 0.0)


def fedavgm_step(mean: Tensor, momentum: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Computes the step of ``FedAvgM``, and m, zero before the first round; β = 0 is FedAvg, bit for bit."""
    new = momentum * beta + mean
    return new, new


def fedadagrad_step(mean: Tensor, second: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Computes the step of ``FedAdagrad``, and v, which is at least 0."""
    second = second + mean.square()
    return mean / (second.sqrt() + epsilon), second


def fedadam_step(
    mean: Tensor, first: Tensor, second: Tensor, beta1: float, beta2: float, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the step of ``FedAdam``, and z = ``first``, zero before the first round, and v = ``second``."""
    first = first * beta1 + mean * (1 - beta1)
    second = second * beta2 + mean.square() * (1 - beta2)
    return first / (second.sqrt() + epsilon), first, second


def fedyogi_step(
    mean: Tensor, first: Tensor, second: Tensor, beta1: float, beta2: float, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the step of ``FedYogi``, which is FedAdam with another v, and z and v.

    v follows Δ² by steps whose size does not depend on v, and stays at least 0.
    """
    first = first * beta1 + mean * (1 - beta1)
    square = mean.square()
    second = second - square * (second - square).sign() * (1 - beta2)
    return first / (second.sqrt() + epsilon), first, second


def feddyn_step(
    mean: Tensor, correction: Tensor, alpha: float, num_clients: int, num_registered: int
) -> tuple[Tensor, Tensor]:
    """Computes the step of ``FedDynServer``, and h, zero before the first round; here Δ is the unweighted mean.

    ``num_clients`` are those that entered the round, n; ``num_registered`` are all that hold samples, N. In exact
    arithmetic u does not depend on α.
    """
    correction = correction - mean * (alpha * num_clients / num_registered)
    return mean - correction / alpha, correction


def term_weights(losses: Array, shares: Array, t: float) -> Array:
    """Computes p_i e^{t f_i} / Σ p_j e^{t f_j} of ``TERM``, from f_i and p_i.

    The greatest t f_i is subtracted before the exponential, which changes no weight. t → ∞ puts all weight on the
    greatest loss, t → -∞ on the least.
    """
    tilts = t * losses
    powers = shares * np.exp(tilts - tilts.max())
    weights: Array = powers / powers.sum()
    return weights


def adjusted_weights(shares: Array, gaps: Array, step: float) -> Array:
    """Moves weights towards clients of a greater gap, as ``FedDGGA`` does.

    a_i ∝ max(a_i + d (G_i - Ḡ) / max_j |G_j - Ḡ|, 0), summing to 1; Ḡ is the mean of the gaps, without which gaps that
    are all positive would raise every weight. d = 0, and gaps that are equal to rounding, leave all weights as they
    are.
    """
    away = gaps - gaps.mean()
    largest = np.abs(away).max()
    if not step or largest <= _EQUAL * np.abs(gaps).max():
        return shares
    moved = np.maximum(shares + step * away / largest, 0.0)
    weights: Array = moved / moved.sum()
    return weights


def project_onto_simplex(point: Array) -> Array:
    """Finds the nearest point with coordinates of at least 0 that sum to 1 (Duchi et al., ICML 2008, Figure 1)."""
    ordered = np.sort(point)[::-1]
    excess = (np.cumsum(ordered) - 1) / np.arange(1, len(point) + 1)
    projected: Array = np.maximum(point - excess[np.flatnonzero(ordered > excess)[-1]], 0.0)
    return projected


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
