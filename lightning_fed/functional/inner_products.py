"""Inner products and distances between the rows of a cohort's matrix, in double precision."""

import torch
from torch import Tensor

__all__ = ["gram_matrix", "squared_distances", "wide_dtype"]

# Columns taken at a time: what is widened to double precision stays small beside the matrix itself.
_COLUMNS = 1 << 16


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Returns the dtype to sum in: float64, or float32 on devices that have no other."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def gram_matrix(rows: Tensor) -> Tensor:
    """Computes the inner products ⟨r_i, r_j⟩ of all pairs of rows.

    A row that is not finite spoils its own row and column only.

    Args:
        rows: Tensor of shape (n, d), floating.

    Returns:
        Tensor of shape (n, n), float64, on the device of ``rows``.
    """
    gram = rows.new_zeros(len(rows), len(rows), dtype=wide_dtype(rows))
    for columns in torch.split(rows, _COLUMNS, dim=1):
        block = columns.to(gram.dtype)
        gram.addmm_(block, block.T)
    return gram


def squared_distances(rows: Tensor) -> Tensor:
    """Computes ‖r_i - r_j‖² of all pairs of rows.

    Differences are taken before they are squared: from inner products, the distance of two long rows that lie close
    together would be lost to rounding. Each pair is summed alike, so equal rows have equal distances to the bit.

    Args:
        rows: Tensor of shape (n, d), floating.

    Returns:
        Symmetric tensor of shape (n, n) with zeros on its diagonal, float64, on the device of ``rows``.
    """
    distances = rows.new_zeros(len(rows), len(rows), dtype=wide_dtype(rows))
    for i, row in enumerate(rows):
        wide = row.to(distances.dtype)
        for j in range(i + 1, len(rows)):
            difference = wide - rows[j]
            distances[i, j] = distances[j, i] = torch.dot(difference, difference)
    return distances
