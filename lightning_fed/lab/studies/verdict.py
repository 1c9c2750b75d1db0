"""Verdicts of paired runs on a claimed gain, and the gains that they could detect."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

import numpy as np

from lightning_fed.lab.studies.comparison import PairedDifference

__all__ = ["Verdict", "Word", "has_settled", "is_near", "pairs_needed", "power", "verdict_on", "visible_gain"]

Word: TypeAlias = Literal["reproduced", "contradicted", "undecided", "nothing learned"]

_LEVEL, _POWER = 0.05, 0.8
# More seeds than anybody runs.
_MOST = 100_000
# In units of an accuracy in [0, 1]; for another metric shares of the baseline's mean.
_NEAR, _FLAT = 0.03, 0.005


@dataclass(frozen=True)
class Verdict:
    """A verdict on one comparison.

    Attributes:
        claimed: The claimed gain g, published or the smallest of interest, in the metric's unit.
        word: ``reproduced`` if the 95 % CI is on the claimed side of 0; ``contradicted`` if it ends before g and the
            baseline matches the paper's; ``nothing learned`` if the baseline has not reached ``report.learned``.
    """

    claimed: float
    word: Word


def power(gain: float, std: float, pairs: int) -> float:
    """Returns the power of a two-sided paired t-test at 5 %: the probability that it detects a gain.

    1 - F(t*; n - 1, λ) + F(-t*; n - 1, λ) with F of the noncentral t distribution, λ = |gain| √n / std.

    Args:
        gain: True mean difference.
        std: Standard deviation s_d of the differences, above 0.
        pairs: n, at least 2.
    """
    return _power_at(abs(gain) * math.sqrt(pairs) / std, pairs)


def _power_at(shift: float, pairs: int) -> float:
    from scipy import stats

    edge = float(stats.t.ppf(1 - _LEVEL / 2, pairs - 1))
    # For a large shift scipy returns NaN for the other tail, which is 0.
    other = float(np.nan_to_num(stats.nct.cdf(-edge, pairs - 1, shift)))
    return float(stats.nct.sf(edge, pairs - 1, shift)) + other


@cache
def _shift_for(pairs: int) -> float:
    """Returns the λ at which the power is 80 %."""
    from scipy.optimize import brentq

    return float(brentq(lambda shift: _power_at(shift, pairs) - _POWER, 0.0, 30.0))


def visible_gain(std: float, pairs: int) -> float:
    """Returns the gain that is detected with 80 % power, see ``power``; NaN for fewer than 2 pairs."""
    return _shift_for(pairs) * std / math.sqrt(pairs) if pairs > 1 else math.nan


def pairs_needed(gain: float, std: float) -> int | None:
    """Returns the smallest number of pairs that detects a gain with 80 % power; None above 100,000 or for gain 0."""
    if not gain or not math.isfinite(std):
        return None
    low, high = 1, 2
    while visible_gain(std, high) > abs(gain):
        if high > _MOST:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if visible_gain(std, middle) > abs(gain) else (low, middle)
    return high


def has_settled(curves: Sequence[Mapping[int, float]], scale: float) -> bool:
    """Says whether curves have reached a plateau.

    They have if the mean over seeds of the last tenth of the rounds is within 0.5 points of that of the tenth before.

    Args:
        curves: Values by evaluated round, one curve for each seed.
        scale: 1 for an accuracy in [0, 1], for another metric its size.
    """
    at = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    tenth = (at[-1] if at else 0) / 10
    late, before = [r for r in at if r > at[-1] - tenth], [r for r in at if at[-1] - 2 * tenth < r <= at[-1] - tenth]
    if not late or not before:
        return False
    ends, starts = (np.mean([curve[r] for curve in curves for r in rounds]) for rounds in (late, before))
    return bool(abs(ends - starts) <= _FLAT * scale)


def verdict_on(difference: PairedDifference, claimed: float, level: bool, learned: bool) -> Verdict | None:
    """Returns the verdict on a difference; None without a difference or a claimed gain.

    Args:
        difference: The difference to the baseline.
        claimed: The claimed gain; negative if less is better.
        level: Whether the baseline matches the paper's, or both methods have reached their plateau.
        learned: Whether the baseline has reached ``report.learned``.
    """
    low, high = sorted(math.copysign(1, claimed) * end for end in difference.t_interval)
    if not claimed or math.isnan(low) or math.isnan(high):
        return None
    if not learned:
        return Verdict(claimed, "nothing learned")
    if low > 0:
        return Verdict(claimed, "reproduced")
    return Verdict(claimed, "contradicted" if high < abs(claimed) and level else "undecided")


def is_near(mean: float, published: float, scale: float) -> bool:
    """Says whether a baseline is within 3 points of the published one; both in the metric's unit."""
    return abs(mean - published) <= _NEAR * scale
