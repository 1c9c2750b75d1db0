"""How far vectors point in the same direction, from the sum of their directions."""

import torch
from torch import Tensor

from lightning_fed.functional.inner_products import wide_dtype

__all__ = ["direction_cosines"]


def direction_cosines(directions: Tensor, count: Tensor | int, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the mean cosine of pairs of vectors, and the mean cosine of each to another vector.

    With s = Σ d_i of unit vectors, Σ_{i≠j} ⟨d_i, d_j⟩ = ‖s‖² - n.

    Args:
        directions: s, shape (d,).
        count: n, the vectors of length 1 in the sum; those that are 0 have no direction.
        mean: The other vector, shape (d,).

    Returns:
        (‖s‖² - n) / (n (n - 1)), NaN for n < 2, and ⟨s, mean⟩ / (n ‖mean‖), NaN where that is 0; both shape ().
    """
    wide, other = directions.to(wide_dtype(directions)), mean.to(wide_dtype(mean))
    n = torch.as_tensor(count, dtype=wide.dtype, device=wide.device)
    pairs = torch.where(n > 1, (wide.square().sum() - n) / (n * (n - 1)), torch.nan)
    return pairs, wide.dot(other) / (n * torch.linalg.vector_norm(other))
