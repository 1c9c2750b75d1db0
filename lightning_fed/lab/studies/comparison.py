"""Comparisons of methods over seeds and data sets, or at equal loss: statistical tests, and verdicts on claimed gains.

Dror et al., "The Hitchhiker's Guide to Testing Statistical Significance in NLP", ACL 2018 (paired tests and bootstrap);
Holm, "A Simple Sequentially Rejective Multiple Test Procedure", Scandinavian Journal of Statistics 1979; Demšar,
"Statistical Comparisons of Classifiers over Multiple Data Sets", JMLR 2006 (average ranks).
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from lightning_fed.lab.common import expect_known
from lightning_fed.lab.report.runs import counted
from lightning_fed.lab.studies.results import AT_EQUAL, StudyResults, StudyRun, is_lost, value_of_run
from lightning_fed.lab.studies.study import Report, Study
from lightning_fed.runs.statistics import Goal, goal_of

__all__ = [
    "PairedDifference", "Verdict", "average_ranks", "chance", "equal_losses", "has_settled", "holm_adjusted",
    "is_level", "paired_difference", "pairs_needed", "power", "still_improves", "value_of", "verdict_on",
    "visible_gain", "with_equal_loss",
]  # fmt: skip

_RESAMPLES, _COVERAGE = 9999, 0.95
_FEWEST = 10  # of fewer pairs the resampled means lie too close to each other, however many are drawn
_LEVEL, _POWER = 0.05, 0.8
_COUNTS = range(2, 2**17 + 1)  # of pairs; nobody runs more seeds
_NEAR = 0.03  # of an accuracy in [0, 1]; for another metric a share of the baseline's mean
# A curve still improves by its last fifth: at least 4 values, and a slope of twice its standard error.
_FIFTH, _FEWEST_VALUES, _NOISE = 5, 4, 2.0

_Curve = Mapping[int, float]


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
    """Returns the difference ``values - baseline`` of pairs, shape (n,), such as runs with the same seed.

    Its bootstrap has 9,999 resamples. Its test has p = 0 if all differences are equal and not 0, and p = 1 if all
    differences are 0, both up to a relative rounding error of 1e-12.
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

    Shape (k,), in any order and returned in this order; NaN values do not count as tests and stay NaN.
    """
    adjusted = np.asarray(p_values, dtype=np.float64).copy()
    order = np.argsort(adjusted)[: int(np.isfinite(adjusted).sum())]  # argsort puts NaN last
    factors = np.arange(len(order), 0, -1)
    adjusted[order] = np.maximum.accumulate(np.minimum(1.0, factors * adjusted[order]))
    return adjusted


def average_ranks(values: NDArray[np.float64], lower_is_better: bool = False) -> NDArray[np.float64]:
    """Ranks methods on each data set, with 1 for the best, and averages the ranks over data sets.

    Of values of shape (methods, data sets), to shape (methods,). Equal methods share the mean of their ranks, NaN ranks
    last.
    """
    from scipy import stats

    badness = np.where(np.isnan(values), np.inf, values if lower_is_better else -values)
    ranks: NDArray[np.float64] = stats.rankdata(badness, axis=0).mean(axis=1)
    return ranks


@dataclass(frozen=True)
class Verdict:
    """What a comparison says, in the words of docs/results/protocol.md.

    Attributes:
        claimed: The claimed gain g, published or the smallest of interest, in the metric's unit.
        here: By the 95 % CI alone ``ahead``, ``ahead by less than g`` if it ends below g, ``behind``, ``level`` if it
            has 0 and stays within g on both sides, else ``undecided``. Or ``nothing learned``.
        word: The same for a question of one's own. Of a published gain ``reproduced`` if the CI is on its side of 0,
            ``contradicted`` if it ends before g, or ``undecided`` with the reason.
        failed: The gates that a published gain does not pass; None for a question of one's own.
    """

    claimed: float
    here: str
    word: str
    failed: tuple[str, ...] | None = None


def power(shift: float, pairs: int) -> float:
    """Returns the power of a two-sided paired t-test at 5 %: the probability that it detects a gain.

    1 - F(t*; n - 1, λ) + F(-t*; n - 1, λ) with F of the noncentral t distribution and the shift λ = |gain| √n / std, of
    n >= 2 pairs whose differences have the mean ``gain`` and the standard deviation ``std`` above 0.
    """
    from scipy import stats

    edge = float(stats.t.ppf(1 - _LEVEL / 2, pairs - 1))
    # For a large shift scipy returns NaN for the other tail, which is 0.
    other = float(np.nan_to_num(stats.nct.cdf(-edge, pairs - 1, shift)))
    return float(stats.nct.sf(edge, pairs - 1, shift)) + other


def chance(gain: float, difference: PairedDifference) -> float:
    """Returns the power for a gain of a test on pairs that vary as these; NaN where they do not vary."""
    std, pairs = difference.std, difference.pairs
    return power(abs(gain) * math.sqrt(pairs) / std, pairs) if std > 0 else math.nan


@cache
def _shift_for(pairs: int) -> float:
    """Returns the λ at which the power is 80 %."""
    from scipy.optimize import brentq

    return float(brentq(lambda shift: power(shift, pairs) - _POWER, 0.0, 30.0))


def visible_gain(std: float, pairs: int) -> float:
    """Returns the gain that is detected with 80 % power, see ``power``; NaN for fewer than 2 pairs."""
    return _shift_for(pairs) * std / math.sqrt(pairs) if pairs > 1 else math.nan


def pairs_needed(gain: float, std: float) -> int | None:
    """Returns the smallest number of pairs that detects a gain with 80 % power; None above 131,072 or for gain 0."""
    if not gain or not math.isfinite(std):
        return None
    at = bisect_left(_COUNTS, True, key=lambda pairs: visible_gain(std, pairs) <= abs(gain))
    return _COUNTS[at] if at < len(_COUNTS) else None


def has_settled(curves: Sequence[_Curve], within: float) -> bool:
    """Says whether curves are flat over the last fifth of the rounds.

    They are if the mean over seeds of the last tenth of the rounds is ``within`` that of the tenth before.
    """
    at = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    tenth = (at[-1] if at else 0) / 10
    late, before = [r for r in at if r > at[-1] - tenth], [r for r in at if at[-1] - 2 * tenth < r <= at[-1] - tenth]
    if not late or not before:
        return False
    ends, starts = (np.mean([curve[r] for curve in curves for r in rounds]) for rounds in (late, before))
    return bool(abs(ends - starts) <= within)


def is_level(apart: float | None, gain: float, scale: float, sides: Sequence[Sequence[_Curve]]) -> bool:
    """Says whether a comparison is made at the paper's level, so that it can speak of the paper's gain g.

    It is if the baseline is at most g/2 ``apart`` from the published one. Or if both methods, whose curves are the two
    ``sides``, are flat to g/2, and the baseline is at most 3 points apart; where no level is published (None) the
    plateau alone decides. ``scale`` is 1 for an accuracy in [0, 1], for another metric its size.
    """
    half = abs(gain) / 2
    if apart is not None and abs(apart) <= half:
        return True
    return abs(apart or 0.0) <= _NEAR * scale and all(has_settled(curves, half) for curves in sides)


def verdict_on(
    difference: PairedDifference, claimed: float, better: int, learned: bool, failed: Sequence[str] | None = None
) -> Verdict | None:
    """Returns the verdict on a difference; None without a difference or a claimed gain.

    Args:
        difference: The difference to the baseline.
        claimed: The claimed gain; negative if less is claimed.
        better: 1 if more is better, else -1.
        learned: Whether the baseline has reached ``report.learned``.
        failed: The gates that a published gain does not pass, for a word each; None for a question of one's own.
    """
    if not claimed or math.isnan(difference.t_interval[0]):
        return None
    if not learned:
        return Verdict(claimed, "nothing learned", "nothing learned", None if failed is None else (*failed,))
    gain, (low, high) = abs(claimed), sorted(better * end for end in difference.t_interval)
    here = "level" if -gain < low <= high < gain else "undecided"
    if low > 0 or high < 0:
        here = "behind" if high < 0 else "ahead" if high >= gain else "ahead by less than g"
    if failed is None:
        return Verdict(claimed, here, here)
    low, high = sorted(math.copysign(1, claimed) * end for end in difference.t_interval)
    word = "reproduced" if low > 0 else "contradicted" if high < gain else ""
    if failed or not word:
        word = f"undecided ({', '.join(failed) if word else 'seeds'})"
    return Verdict(claimed, here, word, (*failed,))


def equal_losses(report: Report) -> list[str]:
    """Returns the losses at which runs are compared."""
    return [name.removeprefix(AT_EQUAL) for name in report.statistic if name.startswith(AT_EQUAL)]


def value_of(run: StudyRun, statistic: str, metric: str, goal: Goal | None = None) -> float:
    """Returns a statistic of one run, NaN if it diverged; at equal loss what ``with_equal_loss`` has read, or NaN."""
    if statistic.startswith(AT_EQUAL) or (metric, statistic) in run.read:
        return run.read.get((metric, statistic), math.nan)
    return value_of_run(run.curves[metric], statistic, metric, goal)


def with_equal_loss(study: Study, results: StudyResults) -> tuple[StudyResults, list[str]]:
    """Reads metrics at equal loss, if the report asks for it, and returns notes on the numbers.

    Runs that differ only in the baseline's axes are compared. For each seed the level is the max over runs of the min
    over rounds of the loss, which all of them reach. The metric of a run is taken at its first round at or below this
    level. Only rounds with both the loss and the metric count; nothing is interpolated.
    """
    report, notes, runs = study.report, list[str](), [*results.runs]
    measured = sorted({name for run in runs for name in run.curves})
    expect_known("report.statistic", equal_losses(report), measured, "a loss that was measured after `at equal`")
    for loss in equal_losses(report):
        for metric in report.metric:
            found = _first_rounds(runs, report, loss, metric)
            for at, round_ in found.items():
                read = {(metric, AT_EQUAL + loss): runs[at].curves[metric][round_]}
                runs[at] = replace(runs[at], read=runs[at].read | read)
            if found:
                where = f"rounds {min(found.values())} to {max(found.values())}"
                notes.append(f"`{AT_EQUAL}{loss}` takes `{metric}` at {where} of the runs.")
            if left := len(runs) - len(found):
                why = f"they diverged, or no round has both `{loss}` and `{metric}`"
                notes.append(f"{left} of {counted(len(runs), 'run')} have no value at equal `{loss}`: {why}.")
    if report.plateau:
        notes += [note for metric in report.metric if (note := _on_plateau(runs, report, metric))]
    return replace(results, runs=tuple(runs)), notes


def _first_rounds(runs: Sequence[StudyRun], report: Report, loss: str, metric: str) -> dict[int, int]:
    """Returns the round at which each run reaches its level, by the run's index; diverged runs have none."""
    groups: dict[tuple[str, ...], dict[int, _Curve]] = {}
    for at, run in enumerate(runs):
        losses, values = run.curves.get(loss, {}), run.curves.get(metric, {})
        both = {r: x for r, x in losses.items() if r in values and math.isfinite(x)}
        if both and not is_lost(losses) and not is_lost(values):
            key = (*(name for axis, name in run.axes.items() if axis not in report.baseline), str(run.seed))
            groups.setdefault(key, {})[at] = both
    levels = {key: max(min(curve.values()) for curve in group.values()) for key, group in groups.items()}
    return {
        at: next(r for r, x in sorted(curve.items()) if x <= levels[key])
        for key, group in groups.items()
        for at, curve in group.items()
    }


def still_improves(curve: _Curve, metric: str, goal: Goal | None = None) -> bool | None:
    """Tells whether a metric still improves over the last fifth of the rounds.

    It does if the slope of a straight line through these evaluations is above twice its standard error
    √(Σ e² / (n - 2) / Σ (r - r̅)²), with residuals e at rounds r. None for fewer than 4 evaluations or a diverged run.
    """
    from scipy.stats import linregress

    end = max(curve, default=0)
    rounds = np.array([at for at in curve if at > end - end / _FIFTH], dtype=np.float64)
    if len(rounds) < _FEWEST_VALUES or is_lost(curve):
        return None
    values = np.array([curve[int(at)] for at in rounds]) * (-1 if goal_of(metric, goal, "report.goal") == "min" else 1)
    line = linregress(rounds, values)
    rounding = 1e-12 * float(np.abs(values).max())  # of equal values
    return bool(line.slope > max(_NOISE * line.stderr, rounding))


def _on_plateau(runs: Sequence[StudyRun], report: Report, metric: str) -> str:
    """Returns a note on how many runs of each method still improve."""
    told: dict[str, list[bool]] = {}
    goal = report.goal_in(metric)
    for run in runs if goal else ():
        improves = still_improves(run.curves.get(metric, {}), metric, goal)
        if improves is not None:
            named = [run.axes[axis] for axis in report.baseline or run.axes]
            told.setdefault(", ".join(named), []).append(improves)
    word = "falling" if goal == "min" else "rising"
    counts = "; ".join(f"{name or 'all'} {sum(one)} of {len(one)}" for name, one in told.items())
    return f"`{metric}` still {word} over the last fifth of the rounds: {counts}." if counts else ""
