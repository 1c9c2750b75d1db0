"""Weights of clients by their losses, arrays of shape (n,): clients with larger losses weigh more."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["adjusted_weights", "project_onto_simplex", "term_weights"]

Array: TypeAlias = npt.NDArray[np.float64]

# Gaps that differ by no more than this share of the largest are equal.
_EQUAL = 1e-12


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
