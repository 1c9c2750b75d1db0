"""Server rules: the step of the global vector, from the cohort's pseudo-gradient and the server's state.

Every step returns u, before mask and server learning rate, and then the new server state; its arguments are left as
they are. Δ = Σ p_i δ_i with δ_i = w_i - w is the pseudo-gradient, in the server's direction of travel.
"""

import torch
from torch import Tensor

from lightning_fed.functional.geometry import wide_dtype

__all__ = ["fedadagrad_step", "fedadam_step", "fedavgm_step", "feddyn_step", "fedexp_factor", "fedyogi_step"]


def fedexp_factor(mean: Tensor, mean_square: Tensor, epsilon: float) -> Tensor:
    """Computes η_g = max(1, Σ p_i ‖δ_i‖² / (2 (‖Δ‖² + ε))) (Jhunjhunwala, Wang, Joshi, ICLR 2023, Algorithm 1).

    In double precision, and 1 where ε is 0 and Δ too, or what is left of updates that cancel but for their rounding.

    Args:
        mean: Δ, shape (d,), floating.
        mean_square: Σ p_i ‖δ_i‖², shape ().
        epsilon: ε, at least 0, in the unit of squared updates.

    Returns:
        η_g, shape (), as wide as ``mean_square``.
    """
    below = 2 * (torch.linalg.vector_norm(mean, dtype=wide_dtype(mean)).square() + epsilon)
    hidden = 2 * (16 * torch.finfo(mean.dtype).eps) ** 2 * mean_square
    return torch.where(below > hidden, mean_square / below, 1.0).clamp(min=1.0)


def fedavgm_step(mean: Tensor, momentum: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Computes m <- β m + Δ and u = m (Hsu, Qi and Brown, 2019, "Measuring the Effects of Non-Identical Data").

    β = 0 is FedAvg, bit for bit.

    Args:
        mean: Δ, shape (d,), floating.
        momentum: m, shape (d,), zeros before the first round.
        beta: β in [0, 1).

    Returns:
        u and the new m, each of shape (d,) in the dtype of ``mean``.
    """
    new = momentum * beta + mean
    return new, new


def fedadagrad_step(mean: Tensor, second: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Computes v <- v + Δ² and u = Δ / (√v + ε) (Reddi et al., ICLR 2021, Algorithm 2, with β1 = 0).

    Args:
        mean: Δ, shape (d,), floating.
        second: v >= 0, shape (d,), ε² before the first round.
        epsilon: ε above 0, Reddi's τ.

    Returns:
        u and the new v, each of shape (d,) in the dtype of ``mean``.
    """
    second = second + mean.square()
    return mean / (second.sqrt() + epsilon), second


def fedadam_step(
    mean: Tensor, first: Tensor, second: Tensor, beta1: float, beta2: float, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes FedAdam's step (Reddi et al., ICLR 2021, Algorithm 2).

    z <- β1 z + (1 - β1) Δ; v <- β2 v + (1 - β2) Δ²; u = z / (√v + ε), without bias correction. z = ``first`` is zero
    before the first round, β1 and β2 are in [0, 1); the other arguments are those of ``fedadagrad_step``.

    Returns:
        u, the new z and the new v, each of shape (d,) in the dtype of ``mean``.
    """
    first = first * beta1 + mean * (1 - beta1)
    second = second * beta2 + mean.square() * (1 - beta2)
    return first / (second.sqrt() + epsilon), first, second


def fedyogi_step(
    mean: Tensor, first: Tensor, second: Tensor, beta1: float, beta2: float, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes FedYogi's step (Reddi et al., ICLR 2021, Algorithm 2): FedAdam with another v.

    v <- v - (1 - β2) Δ² sign(v - Δ²): v follows Δ² by steps whose size does not depend on v, and stays at least 0.
    Arguments and results are those of ``fedadam_step``.
    """
    first = first * beta1 + mean * (1 - beta1)
    square = mean.square()
    second = second - square * (second - square).sign() * (1 - beta2)
    return first / (second.sqrt() + epsilon), first, second


def feddyn_step(
    mean: Tensor, correction: Tensor, alpha: float, num_clients: int, num_registered: int
) -> tuple[Tensor, Tensor]:
    """Computes the server's half of FedDyn (Acar et al., ICLR 2021, Algorithm 1).

    h <- h - α (1/N) Σ_i δ_i; u = (1/n) Σ_i δ_i - h/α. In exact arithmetic u does not depend on α.

    Args:
        mean: (1/n) Σ δ_i, the unweighted mean, shape (d,), floating.
        correction: h, shape (d,), zeros before the first round.
        alpha: α above 0, the same as the clients'.
        num_clients: n, the clients that entered the round.
        num_registered: N, all clients of the data set that hold samples.

    Returns:
        u and the new h, each of shape (d,) in the dtype of ``mean``.
    """
    correction = correction - mean * (alpha * num_clients / num_registered)
    return mean - correction / alpha, correction
