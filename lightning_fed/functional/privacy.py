"""What noise costs in ε, by Rényi differential privacy (``rdp``); loads no torch."""

import logging
from functools import cache
from typing import Any

from lightning_fed.errors import FederatedError, import_extra

__all__ = ["gaussian_epsilon", "gaussian_noise"]


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


def _event(noise: float, share: float, rounds: int) -> Any:
    dp = _library()
    return dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(share, dp.GaussianDpEvent(noise)), rounds)


@cache
def _library() -> Any:
    dp = import_extra("dp_accounting", "privacy", "ε of differential privacy")
    # It warns of each order of RDP that it leaves out; ε is an upper bound all the same.
    logging.getLogger("absl").addFilter(lambda record: "dp_accounting" not in record.pathname)
    return dp
