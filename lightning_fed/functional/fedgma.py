"""The and-mask on gradients of FedGMA as first published."""

from typing import Literal

from torch import Tensor

from lightning_fed.errors import FederatedError, is_number
from lightning_fed.functional.masks import vote_threshold

__all__ = ["gradient_and_mask"]


def gradient_and_mask(
    sign_sum: Tensor,
    num_clients: int,
    p: float,
    p_means: Literal["formula", "prose"] = "formula",
    votes: Tensor | None = None,
) -> Tensor:
    """Computes M, 1 where enough clients agree on the sign of the gradient, else 0.

    ``formula``: |Σ sign(g_i)| >= p n. ``prose``: max(#+, #-) >= p n, where a share p of the clients has one sign, as
    the text says. For p = 0.8 without zeros the first asks for 90 % of the clients, the second for 80 %. Comparisons
    are made on integers, with p as it was written.

    Source: Tenison, Francis, Rish, "Gradient-Masked Federated Optimization", workshop paper of 2021, section 3.

    Args:
        sign_sum: Σ sign(g_i), shape (d,), floating, holding integers.
        num_clients: n, at least 1.
        p: Share of the clients, in [0, 1].
        p_means: How p is read.
        votes: Σ |sign(g_i)|, shape (d,), which ``prose`` needs.

    Returns:
        M, shape (d,), in the dtype of ``sign_sum``.

    Raises:
        FederatedError: If p is outside [0, 1], or the votes are missing.
    """
    if not is_number(p, least=0, most=1):
        raise FederatedError(
            f"Expected the share of agreeing clients to be in [0, 1], got {p}: change `--aggregator.p`."
        )
    needed = vote_threshold(p, num_clients)
    if p_means == "formula":
        return (sign_sum.abs() >= needed).to(sign_sum.dtype)
    if votes is None:
        raise FederatedError("Expected the number of non-zero signs for `--aggregator.p_means` prose, got none.")
    # max(#+, #-) = (votes + |Σ sign|) / 2, kept whole by doubling the other side.
    return (votes + sign_sum.abs() >= 2 * needed).to(sign_sum.dtype)
