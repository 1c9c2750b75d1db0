"""Server rules: the step of the global vector, from the cohort's pseudo-gradient and the server's state.

Every step returns u, before mask and server learning rate, and then the new server state, each of shape (d,) in the
dtype of ``mean``; its arguments are left as they are. ``mean`` is the pseudo-gradient Δ = Σ p_i δ_i with δ_i = w_i - w,
in the server's direction of travel. The aggregators' docstrings have the equations, and their sources.
"""

import torch
from torch import Tensor

from lightning_fed.functional.geometry import wide_dtype

__all__ = [
    "fedadagrad_step",
    "fedadam_step",
    "fedavgm_step",
    "feddyn_step",
    "fedexp_factor",
    "fedlws_shrinking",
    "fedyogi_step",
]


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
