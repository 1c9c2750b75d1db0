"""Masks computed from the signs of the clients' updates."""

from fractions import Fraction

import torch
from torch import Tensor

from lightning_fed.errors import FederatedError

__all__ = ["agreement", "sign_agreement_mask", "vote_threshold"]


def vote_threshold(threshold: float, num_votes: int) -> int:
    """Returns the smallest vote sum that reaches a threshold: ceil(τ n), in exact arithmetic.

    The number is taken as written: ``Fraction(0.2)`` is not 1/5, ``Fraction("0.2")`` is.

    Args:
        threshold: τ in [0, 1].
        num_votes: n, the number of clients that voted, at least 0.

    Raises:
        FederatedError: If τ is outside [0, 1].
    """
    if not 0 <= threshold <= 1:
        raise FederatedError(
            f"Expected the mask's threshold to be in [0, 1], got {threshold}: change `--aggregator.mask.threshold`."
        )
    exact = Fraction(repr(float(threshold))) * num_votes
    return -(-exact.numerator // exact.denominator)


def agreement(sign_sum: Tensor, num_clients: int) -> Tensor:
    """Computes the sign agreement A = |(1/n) Σ_i sign(δ_i)| (Tenison et al., TMLR 2023, eq. 2).

    Args:
        sign_sum: Σ_i sign(δ_i), shape (d,), floating, holding integers; sign(0) = 0.
        num_clients: n, at least 1.

    Returns:
        A in [0, 1], shape (d,), in the dtype of ``sign_sum``.
    """
    return sign_sum.abs() / num_clients


def sign_agreement_mask(sign_sum: Tensor, num_clients: int, threshold: float, binary: bool = False) -> Tensor:
    """Computes the mask of gradient masked averaging (Tenison et al., TMLR 2023, eq. 2 and Algorithm 1).

    m = 1 where A >= τ, else A (soft) or 0 (binary, the AND-mask of Parascandolo et al., ICLR 2021), with
    A = |(1/n) Σ_i sign(δ_i)|. The comparison is made on integers, so it is exact. τ = 0 gives ones everywhere.

    Args:
        sign_sum: Σ_i sign(δ_i), shape (d,), floating, holding integers.
        num_clients: n, at least 1.
        threshold: τ in [0, 1].
        binary: Whether coordinates below the threshold get 0 instead of A.

    Returns:
        m in [0, 1], shape (d,), in the dtype of ``sign_sum``.

    Raises:
        FederatedError: If τ is outside [0, 1].
    """
    agreed = sign_sum.abs() >= vote_threshold(threshold, num_clients)
    if binary:
        return agreed.to(sign_sum.dtype)
    return torch.where(agreed, sign_sum.new_ones(()), agreement(sign_sum, num_clients))
