"""How far the gradients of a cohort's clients lie apart."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fed.functional.inner_products import wide_dtype

__all__ = ["GradientSpread", "gradient_spread"]

# Columns taken at a time: what is widened to double precision stays small beside the matrix itself.
_COLUMNS = 1 << 16


class GradientSpread(NamedTuple):
    """What ``gradient_spread`` returns, in float64.

    Attributes:
        dissimilarity: r = ½ Σ p_i ‖g_i - g̅‖², shape ().
        distances: ‖g_i - g̅‖, shape (n,).
        norm: ‖g̅‖, shape ().
    """

    dissimilarity: Tensor
    distances: Tensor
    norm: Tensor


def gradient_spread(rows: Tensor, weights: Tensor | None = None) -> GradientSpread:
    """Computes the gradient dissimilarity r = (1/2n) Σ ‖g_i - g̅‖², g̅ = (1/n) Σ g_i, and what it is made of.

    r is half the trace of the covariance of the clients' gradients. With weights p_i it is ½ Σ p_i ‖g_i - g̅‖² with
    g̅ = Σ p_i g_i. For equal rows, or one, it is exactly 0.

    Source: Dandi, Barba, Jaggi, "Implicit Gradient Alignment in Distributed and Federated Learning", AAAI 2022, section
    3 (r) and figures 5, 7 and 9 (the distance of the first client).

    Args:
        rows: g_i = ∇f_i(w), shape (n, d), n at least 1, floating.
        weights: p_i before normalisation, shape (n,), not negative; None for equal ones.

    Returns:
        r, the distances ‖g_i - g̅‖ and ‖g̅‖, on the device of ``rows``.
    """
    wide = wide_dtype(rows)
    shares = torch.ones(len(rows)) if weights is None else weights
    shares = shares.to(device=rows.device, dtype=wide)
    shares = shares / shares.sum()
    squares, mean_square = rows.new_zeros(len(rows), dtype=wide), rows.new_zeros((), dtype=wide)
    for columns in torch.split(rows, _COLUMNS, dim=1):
        first = columns[0].to(wide)
        # From one of them, not from zero: gradients that are long and alike would lose their differences to rounding.
        apart = columns.to(wide) - first
        mean = shares @ apart
        squares += apart.sub_(mean).square_().sum(dim=1)
        mean_square += mean.add_(first).square().sum()
    return GradientSpread(0.5 * (shares @ squares), squares.sqrt(), mean_square.sqrt())
