"""What noise costs in ε, by Rényi differential privacy (``rdp``) or privacy losses (``pld``); loads no torch."""

import logging
from collections.abc import Collection
from functools import cache, lru_cache
from math import ceil, sqrt
from typing import Any

from lightning_fed.errors import FederatedError, expect, import_extra

__all__ = ["gaussian_epsilon", "gaussian_noise", "most_samples", "samples_epsilon", "samples_noise"]


def gaussian_epsilon(noise: float, share: float, rounds: int, delta: float) -> float:
    """Returns ε after some rounds of the Gaussian mechanism on a Poisson sample of clients.

    One client more or less moves a sum by at most 1. RDP of the sampled Gaussian (Mironov, Talwar, Zhang, 2019), made ε
    by Proposition 12 of Canonne, Kamath, Steinke (NeurIPS 2020); the package dp-accounting computes both.

    Args:
        noise: z, the standard deviation of the noise on each coordinate; ε is infinite for 0.
        share: q in (0, 1], the probability with which a client takes part; with 1 nothing is sampled.
        rounds: Rounds, at least 0.
        delta: δ in (0, 1).
    """
    accountant = _library().rdp.RdpAccountant()
    return float(accountant.compose(_event(noise, share, rounds)).get_epsilon(delta)) if rounds else 0.0


def gaussian_noise(epsilon: float, share: float, rounds: int, delta: float) -> float:
    """Returns the least z, to 1e-6, whose ``gaussian_epsilon`` after at least one round is at most ``epsilon``."""
    dp, tools = _library(), _library().mechanism_calibration
    try:
        z = dp.calibrate_dp_mechanism(
            dp.rdp.RdpAccountant, lambda noise: _event(noise, share, rounds), epsilon, delta,
            tools.LowerEndpointAndGuess(0.01, 1.0),
        )  # fmt: skip
    except tools.NoBracketIntervalFoundError:
        raise FederatedError(
            f"Expected `epsilon` to be one that noise can give after {rounds} rounds at `delta` {delta:g}, got "
            f"{epsilon:g}, which no noise reaches or which needs none: change it, or give `noise`."
        ) from None
    return float(z)


def samples_epsilon(
    trained: Collection[tuple[int, int]], noise: float, batch: int, most: int, delta: float, grid: float = 1e-4
) -> float:
    """Returns the largest ε of clients after DP-SGD, one sample of a client more or less.

    By privacy loss distributions on a grid, which bounds ε from above; a coarse one says whose ε to compute. They know
    of Poisson batches that are cut to a size (Ganesh et al., 2025, arXiv:2508.15089).

    Args:
        trained: Samples n of each client and the steps that it took.
        noise: z, in units of the clip; below 0.3 no sampling is counted (``rdp``).
        batch: B; a sample is in a batch with probability min(1, B / n).
        most: M, the most samples of a batch.
        delta: δ in (0, 1).
        grid: Distance of neighbouring privacy losses.
    """
    bounds = {each: _client_epsilon(*each, noise, batch, most, delta, 1e-2) for each in trained}
    largest = 0.0
    for each in sorted(bounds, key=bounds.__getitem__, reverse=True):
        if bounds[each] > largest:
            largest = max(largest, _client_epsilon(*each, noise, batch, most, delta, grid))
    return largest


def most_samples(batch: int) -> int:
    """Returns M for B: the Poisson batch of B samples on average is hardly ever 5 standard deviations larger."""
    return ceil(batch + 5 * sqrt(batch))


def samples_noise(trained: Collection[tuple[int, int]], epsilon: float, batch: int, most: int, delta: float) -> float:
    """Returns a z of at least 0.5, the least to 1 %, whose ``samples_epsilon`` is at most ``epsilon``."""
    low, high = 0.5, 1000.0
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        spent = samples_epsilon(trained, middle, batch, most, delta, 1e-3)
        low, high = (middle, high) if spent > epsilon else (low, middle)
    expect(high < 1000, f"Expected `epsilon` to be one that noise can give, got {epsilon:g}: give `noise`.")
    return high


@cache
def _client_epsilon(samples: int, steps: int, noise: float, batch: int, most: int, delta: float, grid: float) -> float:
    if noise < 0.3 or not steps:  # tables would not fit into memory; a cut lets a sample move a sum by 2
        return gaussian_epsilon(noise / 2, 1.0, steps, delta)
    return float(_losses(noise, samples, batch, most, grid).self_compose(steps).get_epsilon_for_delta(delta))


@lru_cache(maxsize=32)  # a fine one takes some MB
def _losses(noise: float, samples: int, batch: int, most: int, grid: float) -> Any:
    make = _library().pld.privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism
    return make(samples, min(1.0, batch / samples), most, noise, grid)


def _event(noise: float, share: float, rounds: int) -> Any:
    dp = _library()
    return dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(share, dp.GaussianDpEvent(noise)), rounds)


@cache
def _library() -> Any:
    dp = import_extra("dp_accounting", "privacy", "ε of differential privacy")
    # It warns of each order of RDP that it leaves out; ε is an upper bound all the same.
    logging.getLogger("absl").addFilter(lambda record: "dp_accounting" not in record.pathname)
    return dp
