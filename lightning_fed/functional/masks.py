"""Masks computed from how far the clients' updates, or their gradients, agree."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from lightning_fed.errors import FederatedError, expect_choice, is_number

__all__ = [
    "agreement", "coin_flip_votes", "gradient_and_mask", "magnitude_agreement", "magnitude_agreement_mask",
    "sand_mask", "sign_agreement_mask", "vote_threshold",
]  # fmt: skip


def _as_written(threshold: float) -> Fraction:
    """Returns τ as the number that was written: ``Fraction(0.2)`` is not 1/5, ``Fraction("0.2")`` is."""
    if not is_number(threshold, least=0, most=1):
        raise FederatedError(
            f"Expected the threshold of agreement to be in [0, 1], got {threshold}: change "
            "`--aggregator.mask.threshold`, or `--aggregator.p` of FedGMA."
        )
    return Fraction(repr(float(threshold)))


def vote_threshold(threshold: float, num_votes: int, comparison: Literal[">=", ">"] = ">=") -> int:
    """Returns the smallest vote sum that reaches a threshold: ceil(τ n) for A >= τ, floor(τ n) + 1 for A > τ.

    In exact arithmetic, with τ in [0, 1] taken as it is written; n is the largest possible sum: all clients, or their
    samples if these weigh the votes.
    """
    expect_choice("--aggregator.mask.comparison", comparison, (">=", ">"))
    exact = _as_written(threshold) * num_votes
    return -(-exact.numerator // exact.denominator) if comparison == ">=" else exact.numerator // exact.denominator + 1


def agreement(sign_sum: Tensor, num_votes: int) -> Tensor:
    """Computes the sign agreement A = |(1/n) Σ_i sign(δ_i)| in [0, 1], shape (d,), in the dtype of ``sign_sum``.

    ``sign_sum`` is Σ_i sign(δ_i), floating, holding integers, and sign(0) = 0; or Σ_i s_i sign(δ_i) with the clients'
    samples s_i, and then ``num_votes`` is Σ_i s_i instead of n.
    """
    return sign_sum.abs() / num_votes


def coin_flip_votes(num_votes: int) -> Tensor:
    """Computes how likely each |Σ_i sign(δ_i)| is if the n signs are independent flips of a fair coin.

    P(|2 K - n| = s) with K ~ Binomial(n, 1/2) for s = 0, 1, ..., n, shape (n + 1,), float64; no vote is 0. Summed over
    s below ``vote_threshold(τ, n)``, it is the expected share of coordinates with A < τ if clients do not agree at all.
    """
    ups = torch.arange(num_votes + 1, dtype=torch.float64)
    log_ways = ups[-1].add(1).lgamma() - ups.add(1).lgamma() - ups.flip(0).add(1).lgamma()
    chances = (log_ways - num_votes * math.log(2)).exp()
    return torch.zeros_like(chances).index_add_(0, (2 * ups - num_votes).abs().long(), chances)


def sign_agreement_mask(
    sign_sum: Tensor,
    num_votes: int,
    threshold: float,
    binary: bool = False,
    comparison: Literal[">=", ">"] = ">=",
) -> Tensor:
    """Computes the mask m of ``SignAgreement``, in [0, 1], shape (d,), in the dtype of ``sign_sum``.

    The comparison is made on integers, so it is exact. With ``>=``, τ = 0 gives ones everywhere; with ``>`` it does
    not: coordinates on which the votes cancel get 0. ``sign_sum`` and ``num_votes`` are as in ``agreement``, the sum in
    float64 if it can be above 2^24.
    """
    agreed = sign_sum.abs() >= vote_threshold(threshold, num_votes, comparison)
    if binary:
        return agreed.to(sign_sum.dtype)
    return torch.where(agreed, sign_sum.new_ones(()), agreement(sign_sum, num_votes))


def magnitude_agreement(total: Tensor, abs_total: Tensor) -> Tensor:
    """Computes the magnitude agreement A = |Σ_i δ_i| / Σ_i |δ_i|, unweighted, in [0, 1], with 0/0 = 0; all (d,)."""
    return torch.where(abs_total > 0, total.abs() / abs_total, abs_total.new_zeros(()))


def magnitude_agreement_mask(total: Tensor, abs_total: Tensor, threshold: float, binary: bool = False) -> Tensor:
    """Computes the mask m of ``MagnitudeAgreement``, in [0, 1], shape (d,), from the sums of ``magnitude_agreement``.

    It does not change when all updates are scaled alike, but it does when one is. τ is rounded to their dtype.
    """
    _as_written(threshold)
    found = magnitude_agreement(total, abs_total)
    agreed = found >= threshold
    return agreed.to(found.dtype) if binary else found.masked_fill_(agreed, 1.0)


def sand_mask(
    sign_sum: Tensor,
    variance: Tensor,
    num_clients: int,
    threshold: float,
    k: float,
    sizes: Sequence[int],
) -> Tensor:
    """Computes the mask m of ``SANDMask``, shape (d,), at least 0.

    Where the variance is 0, and for a single client, the limit is taken: 1 where A > τ, 0 where A < τ. Where A = τ,
    exactly, m is tanh(0) = 0 whatever the variance; DomainBed has 1e-17 there if the variance is 0.

    ``sign_sum`` is that of ``agreement``, ``variance`` 0 for a single client; ``sizes`` has the elements of each
    parameter tensor, in the order of the vector: over each in which anything is let through the mean of m is 1.
    """
    tie = _as_written(threshold) * num_clients
    gap = agreement(sign_sum, num_clients) - threshold
    if tie.denominator == 1:
        gap.masked_fill_(sign_sum.abs() == tie.numerator, 0.0)
    mask = torch.tanh(gap.mul_(k).div_(variance)).nan_to_num_(0.0).clamp_(min=0.0)
    for tensor in torch.split(mask, list(sizes)):
        tensor.div_(tensor.mean().add_(1e-10))
    return mask


def gradient_and_mask(
    sign_sum: Tensor,
    num_clients: int,
    p: float,
    p_means: Literal["formula", "prose"] = "formula",
    votes: Tensor | None = None,
) -> Tensor:
    """Computes the mask M of ``FedGMA``, 1 where enough clients agree on the sign of the gradient g_i, else 0.

    Comparisons are made on integers, with p as it was written. ``sign_sum`` is Σ sign(g_i), shape (d,), floating,
    holding integers; ``votes``, which ``prose`` needs, is Σ |sign(g_i)|. M has the shape and dtype of ``sign_sum``.
    """
    needed = vote_threshold(p, num_clients)
    if p_means == "formula":
        return (sign_sum.abs() >= needed).to(sign_sum.dtype)
    if votes is None:
        raise FederatedError("Expected the number of non-zero signs for `--aggregator.p_means` prose, got none.")
    # max(#+, #-) = (votes + |Σ sign|) / 2, kept whole by doubling the other side.
    return (votes + sign_sum.abs() >= 2 * needed).to(sign_sum.dtype)
