"""Lengths, inner products and directions of the rows of a cohort's matrix, in double precision."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "GradientSpread", "combine_rows", "direction_cosines", "gradient_spread", "gram_matrix", "squared_distances",
    "value_order", "waits", "wide_dtype",
]  # fmt: skip

# Columns widened to double precision at a time, so that they stay small beside the matrix itself.
_COLUMNS = 1 << 16
# Columns compared at a time, as the first ones mostly tell rows apart.
_FEW_COLUMNS = 1 << 12


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Returns the dtype to sum in: float64, or float32 on devices without float64."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def waits(tensor: Tensor) -> bool:
    """Says whether reading a number means waiting for a device."""
    return tensor.device.type != "cpu"


def combine_rows(rows: Tensor, factors: Tensor) -> Tensor:
    """Computes Σ c_i r_i, shape (d,), in double precision, in ascending order of i.

    r_i are the rows, shape (n, d), floating, and c_i the factors, shape (n,), in ``wide_dtype`` and on their device.
    """
    total = rows.new_zeros(rows.shape[1], dtype=factors.dtype)
    if waits(rows):
        for row, factor in zip(rows, factors, strict=True):
            total.addcmul_(row.to(total.dtype), factor)
    else:
        for row, alpha in zip(rows, factors.tolist(), strict=True):
            total.add_(row, alpha=alpha)
    return total


def gram_matrix(rows: Tensor) -> Tensor:
    """Computes the inner products ⟨r_i, r_j⟩ of rows of shape (n, d): (n, n), float64, on their device.

    A row that is not finite spoils its own row and column only.
    """
    gram = rows.new_zeros(len(rows), len(rows), dtype=wide_dtype(rows))
    for columns in torch.split(rows, _COLUMNS, dim=1):
        block = columns.to(gram.dtype)
        gram.addmm_(block, block.T)
    return gram


def squared_distances(rows: Tensor) -> Tensor:
    """Computes ‖r_i - r_j‖² of rows of shape (n, d): symmetric, (n, n), float64, on their device.

    It squares differences, because computed from inner products the distance of two long rows that lie close together
    would be lost to rounding. Each pair is summed alike, so equal rows have equal distances to the bit.
    """
    distances = rows.new_zeros(len(rows), len(rows), dtype=wide_dtype(rows))
    for i, row in enumerate(rows):
        wide = row.to(distances.dtype)
        for j in range(i + 1, len(rows)):
            difference = wide - rows[j]
            distances[i, j] = distances[j, i] = torch.dot(difference, difference)
    return distances


def value_order(rows: Tensor) -> Tensor:
    """Orders rows by their first coordinate, those with an equal one by the second, and so on; equal rows as they come.

    A choice among clients made in this order does not depend on how they are numbered. ``rows`` are of shape (n, d),
    floating and finite; the result are their indices, shape (n,), int64, on the same device.
    """
    ranks = torch.zeros(len(rows), dtype=torch.int64)
    for columns in torch.split(rows, _FEW_COLUMNS, dim=1):
        block = torch.cat([ranks[:, None], columns.double().cpu()], dim=1)
        ranks = torch.unique(block, dim=0, return_inverse=True)[1]
        if ranks.max() == len(rows) - 1:  # no two are equal so far
            break
    return ranks.argsort(stable=True).to(rows.device)


def direction_cosines(directions: Tensor, count: Tensor | int, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the mean cosine of pairs of n unit vectors d_i, and their mean cosine to another vector, both shape ().

    With s = Σ d_i, shape (d,), as ``directions`` the first is (‖s‖² - n) / (n (n - 1)), NaN for n < 2; the second is
    ⟨s, mean⟩ / (n ‖mean‖), NaN where that is 0. Vectors that are 0 have no direction and do not count.
    """
    wide, other = directions.to(wide_dtype(directions)), mean.to(wide_dtype(mean))
    n = torch.as_tensor(count, dtype=wide.dtype, device=wide.device)
    pairs = torch.where(n > 1, (wide.square().sum() - n) / (n * (n - 1)), torch.nan)
    return pairs, wide.dot(other) / (n * torch.linalg.vector_norm(other))


class GradientSpread(NamedTuple):
    """What ``gradient_spread`` returns, in float64, on the device of the gradients.

    Attributes:
        dissimilarity: r = ½ Σ p_i ‖g_i - g̅‖², shape ().
        distances: ‖g_i - g̅‖, shape (n,).
        norm: ‖g̅‖, shape ().
    """

    dissimilarity: Tensor
    distances: Tensor
    norm: Tensor


def gradient_spread(rows: Tensor, weights: Tensor | None = None) -> GradientSpread:
    """Computes the gradient dissimilarity r = (1/2n) Σ ‖g_i - g̅‖², g̅ = (1/n) Σ g_i, and its parts.

    r is half the trace of the covariance of the clients' gradients, the ``rows`` of shape (n, d), n at least 1. With
    weights p_i, normalised here, it is ½ Σ p_i ‖g_i - g̅‖², g̅ = Σ p_i g_i. For equal rows, or one, it is exactly 0.

    Source: Dandi, Barba, Jaggi, "Implicit Gradient Alignment in Distributed and Federated Learning", AAAI 2022, section
    3 (r) and figures 5, 7 and 9 (the distance of the first client).
    """
    wide = wide_dtype(rows)
    shares = torch.ones(len(rows)) if weights is None else weights
    shares = shares.to(device=rows.device, dtype=wide)
    shares = shares / shares.sum()
    squares, mean_square = rows.new_zeros(len(rows), dtype=wide), rows.new_zeros((), dtype=wide)
    for columns in torch.split(rows, _COLUMNS, dim=1):
        first = columns[0].to(wide)
        # Relative to one of them, as gradients that are long and alike would lose their differences to rounding.
        apart = columns.to(wide) - first
        mean = shares @ apart
        squares += apart.sub_(mean).square_().sum(dim=1)
        mean_square += mean.add_(first).square().sum()
    return GradientSpread(0.5 * (shares @ squares), squares.sqrt(), mean_square.sqrt())
