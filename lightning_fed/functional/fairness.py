"""Weights of clients by their losses: clients with larger losses weigh more."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["adjusted_weights", "project_onto_simplex", "qfedavg_weights", "term_weights"]

Array: TypeAlias = npt.NDArray[np.float64]

# Gaps that differ by no more than this share of the largest are equal.
_EQUAL = 1e-12
# Smaller losses count as this one, because powers can be below 0.
_LEAST = 1e-10


def qfedavg_weights(losses: Array, squares: Array, shares: Array, q: float, lipschitz: float) -> Array:
    """Computes c_i of q-FedAvg's step Σ c_i δ_i (Li, Sanjabi, Beirami, Smith, ICLR 2020, Algorithm 2).

    c_i = p_i f_i^q L / Σ p_j (q f_j^{q-1} L² ‖δ_j‖² + L f_j^q). q = 0 gives p_i, whatever the losses. Powers are of
    f_i / max f, which does not change the quotient and never overflows; a loss below 1e-10 counts as 1e-10.

    Args:
        losses: f_i, shape (n,), at least 0.
        squares: ‖δ_i‖², shape (n,).
        shares: p_i, shape (n,), summing to 1.
        q: Exponent, at least 0.
        lipschitz: L, above 0.
    """
    kept = np.maximum(losses, _LEAST)
    powers = shares * (kept / kept.max()) ** q
    weights: Array = powers / (powers * (q * lipschitz * squares / kept + 1)).sum()
    return weights


def term_weights(losses: Array, shares: Array, t: float) -> Array:
    """Computes p_i e^{t f_i} / Σ p_j e^{t f_j} of tilted losses (Li, Beirami, Sanjabi, Smith, ICLR 2021, Lemma 1).

    The greatest t f_i is subtracted before the exponential, which changes no weight. t = 0 gives p_i; t → ∞ puts all
    weight on the greatest loss, t → -∞ on the least.

    Args:
        losses: f_i, shape (n,).
        shares: p_i, shape (n,), summing to 1.
        t: Any finite number, in the inverse unit of the losses.
    """
    tilts = t * losses
    powers = shares * np.exp(tilts - tilts.max())
    weights: Array = powers / powers.sum()
    return weights


def adjusted_weights(shares: Array, gaps: Array, step: float) -> Array:
    """Moves weights towards clients of a greater gap (Zhang et al., CVPR 2023, generalization adjustment).

    a_i ∝ max(a_i + d (G_i - Ḡ) / max_j |G_j - Ḡ|, 0), summing to 1; Ḡ is the mean of the gaps, without which gaps that
    are all positive would raise every weight. d = 0, and gaps that are equal to rounding, leave all weights as they
    are.

    Args:
        shares: a_i, shape (n,), summing to 1.
        gaps: G_i, shape (n,), finite.
        step: d, at least 0.
    """
    away = gaps - gaps.mean()
    largest = np.abs(away).max()
    if not step or largest <= _EQUAL * np.abs(gaps).max():
        return shares
    moved = np.maximum(shares + step * away / largest, 0.0)
    weights: Array = moved / moved.sum()
    return weights


def project_onto_simplex(point: Array) -> Array:
    """Finds the nearest point with coordinates of at least 0 that sum to 1 (Duchi et al., ICML 2008, Figure 1).

    Args:
        point: Shape (n,), n at least 1, finite.
    """
    ordered = np.sort(point)[::-1]
    excess = (np.cumsum(ordered) - 1) / np.arange(1, len(point) + 1)
    projected: Array = np.maximum(point - excess[np.flatnonzero(ordered > excess)[-1]], 0.0)
    return projected
