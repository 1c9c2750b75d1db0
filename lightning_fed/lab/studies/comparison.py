"""Statistical tests of differences between methods, over seeds and data sets.

Dror et al., "The Hitchhiker's Guide to Testing Statistical Significance in NLP", ACL 2018 (paired tests and bootstrap);
Holm, "A Simple Sequentially Rejective Multiple Test Procedure", Scandinavian Journal of Statistics 1979; Demšar,
"Statistical Comparisons of Classifiers over Multiple Data Sets", JMLR 2006 (average ranks).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["PairedDifference", "average_ranks", "holm_adjusted", "paired_difference"]

_RESAMPLES, _COVERAGE = 9999, 0.95
_FEWEST = 10  # of fewer pairs the resampled means lie too close to each other, however many are drawn


@dataclass(frozen=True)
class PairedDifference:
    """A paired difference to a baseline. Values are NaN if there are too few pairs or a pair is NaN.

    Attributes:
        pairs: Number of pairs n.
        mean: Mean difference d̅.
        t_interval: d̅ ± t(n - 1) s / √n of Student's distribution.
        bootstrap: From n >= 10 resampled pairs, the percentiles at Φ(±√(n / (n - 1)) t(n - 1)) (Hesterberg, "What
            Teachers Should Know About the Bootstrap", The American Statistician 2015); NaN for fewer pairs.
        p_value: p-value of a two-sided paired t-test that the mean is 0.
        std: Standard deviation s of the differences.
    """

    pairs: int
    mean: float
    t_interval: tuple[float, float]
    bootstrap: tuple[float, float]
    p_value: float
    std: float = np.nan


def paired_difference(values: Sequence[float], baseline: Sequence[float], seed: int = 0) -> PairedDifference:
    """Compares two methods on pairs, such as runs with the same seed.

    Args:
        values: One value for each pair, shape (n,).
        baseline: The values of the baseline, shape (n,).
        seed: Seed of the bootstrap, which has 9,999 resamples.

    Returns:
        The difference ``values - baseline``. Its test has p = 0 if all differences are equal and not 0, and p = 1 if
        all differences are 0, both up to a relative rounding error of 1e-12.
    """
    from scipy import stats

    differences = np.subtract(values, baseline, dtype=np.float64)
    unknown = (np.nan, np.nan)
    pairs, mean = len(differences), float(differences.mean()) if len(differences) else np.nan
    if pairs < 2 or not np.isfinite(mean):
        return PairedDifference(pairs, mean, unknown, unknown, np.nan)
    rounding = 1e-12 * np.abs([*values, *baseline]).max()
    if np.ptp(differences) <= rounding:
        p_value = 1.0 if np.abs(differences).max() <= rounding else 0.0
        return PairedDifference(pairs, mean, (mean, mean), unknown if pairs < _FEWEST else (mean, mean), p_value, 0.0)
    test = stats.ttest_1samp(differences, 0.0)
    low, high = test.confidence_interval(_COVERAGE)
    if pairs >= _FEWEST:
        edge = np.sqrt(pairs / (pairs - 1)) * stats.t.ppf((1 + _COVERAGE) / 2, pairs - 1)
        drawn = stats.bootstrap(
            (differences,), np.mean, n_resamples=_RESAMPLES, confidence_level=2 * stats.norm.cdf(edge) - 1,
            method="percentile", random_state=np.random.default_rng(seed),
        ).confidence_interval  # fmt: skip
        unknown = float(drawn.low), float(drawn.high)
    std = float(differences.std(ddof=1))
    return PairedDifference(pairs, mean, (float(low), float(high)), unknown, float(test.pvalue), std)


def holm_adjusted(p_values: Sequence[float]) -> NDArray[np.float64]:
    """Adjusts the p-values of a family of m tests after Holm: p̃_(i) = max_{j ≤ i} min(1, (m - j + 1) p_(j)).

    Args:
        p_values: In any order, shape (k,); NaN values do not count as tests and stay NaN.

    Returns:
        Shape (k,), in the same order.
    """
    adjusted = np.asarray(p_values, dtype=np.float64).copy()
    order = np.argsort(adjusted)[: int(np.isfinite(adjusted).sum())]  # argsort puts NaN last
    factors = np.arange(len(order), 0, -1)
    adjusted[order] = np.maximum.accumulate(np.minimum(1.0, factors * adjusted[order]))
    return adjusted


def average_ranks(values: NDArray[np.float64], lower_is_better: bool = False) -> NDArray[np.float64]:
    """Ranks methods on each data set, with 1 for the best, and averages the ranks over data sets.

    Args:
        values: Shape (methods, data sets); equal methods share the mean of their ranks, NaN ranks last.
        lower_is_better: Whether a smaller value is better.

    Returns:
        Shape (methods,).
    """
    from scipy import stats

    badness = np.where(np.isnan(values), np.inf, values if lower_is_better else -values)
    ranks: NDArray[np.float64] = stats.rankdata(badness, axis=0).mean(axis=1)
    return ranks
