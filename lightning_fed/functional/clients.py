"""How a value is distributed over clients."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fed.functional.geometry import wide_dtype

__all__ = ["ClientSummary", "summarize_clients"]


class ClientSummary(NamedTuple):
    """What ``summarize_clients`` returns, in float64, each of shape ().

    Attributes:
        mean: (1/n) Σ v_i.
        weighted: Σ s_i v_i / Σ s_i.
        worst: Mean of the worst tenth of the clients, ⌈n/10⌉ of them.
        std: sqrt((1/n) Σ (v_i - mean)²), with n and not n - 1, as the clients are all there are.
    """

    mean: Tensor
    weighted: Tensor
    worst: Tensor
    std: Tensor


def summarize_clients(values: Tensor, weights: Tensor, lower_is_better: bool) -> ClientSummary:
    """Computes how a metric is distributed over clients; NaN if one of the values is NaN.

    ``values`` are v_i, one of each client, ``weights`` its samples s_i, with a sum above 0; both of shape (n,), n >= 1.
    """
    values = values.to(wide_dtype(values))
    weights = weights.to(values)
    worst = values.topk(-(-len(values) // 10), largest=lower_is_better).values
    mean = values.mean()
    worst = torch.where(mean.isnan(), mean, worst.mean())  # `topk` takes a NaN for the largest
    return ClientSummary(mean, weights @ values / weights.sum(), worst, values.std(correction=0))
