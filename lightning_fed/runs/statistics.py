"""One number for a run: the best of its evaluations, the last, or the mean over a window of rounds."""

import math
import re
from collections.abc import Mapping
from statistics import fmean

from lightning_fed.errors import FederatedError

__all__ = [
    "LAST",
    "expect_statistic",
    "first_as_good",
    "is_reached",
    "lower_is_better",
    "missing_rounds",
    "run_statistic",
]

LAST = 10
"""The number of last rounds whose mean is reported."""

_WINDOW = re.compile(r"last (?P<count>[1-9]\d*)|rounds (?P<first>\d+)-(?P<last>\d+)")


def lower_is_better(metric: str) -> bool:
    """Tells by its name whether a smaller value of a metric is better."""
    words = ("loss", "error", "perplexity", "time", "bytes", "dissimilarity", "distance", "gradient/norm", "_std",
             "attack/")  # fmt: skip
    return any(word in metric.lower() for word in words)


def expect_statistic(option: str, value: str) -> None:
    """Refuses a text that is not the name of a statistic."""
    window = _WINDOW.fullmatch(value)
    ordered = window is None or window["first"] is None or int(window["first"]) <= int(window["last"])
    if not ordered or (window is None and value not in ("best", "final")):
        raise FederatedError(
            f"Expected `{option}` to be `best`, `final`, `last 10` (rounds) or a window such as `rounds 171-200`, "
            f"got {value!r}."
        )


def run_statistic(curve: Mapping[int, float], statistic: str, metric: str) -> float:
    """Returns a statistic of one run.

    Args:
        curve: Value by evaluated round, in ascending order.
        statistic: ``best`` over the evaluated rounds without NaN; ``final`` at the last evaluated round; ``last N``,
            the mean over the evaluated rounds among the last N; or ``rounds A-B``, the mean over those in the window.
        metric: A column, whose name says whether larger is better.

    Returns:
        The statistic, in the metric's unit; NaN if none of its rounds was evaluated.
    """
    if statistic == "final":
        return curve[max(curve)] if curve else math.nan
    if statistic == "best":
        better = min if lower_is_better(metric) else max
        return better((value for value in curve.values() if not math.isnan(value)), default=math.nan)
    window = _rounds(curve, statistic)
    values = [value for at, value in curve.items() if at in window]
    return fmean(values) if values else math.nan


def is_reached(curve: Mapping[int, float], statistic: str) -> bool:
    """Tells whether any round of a statistic was evaluated."""
    return not curve.keys().isdisjoint(_rounds(curve, statistic))


def missing_rounds(curve: Mapping[int, float], statistic: str) -> int:
    """Counts the rounds of a statistic's window that were not evaluated; 0 for ``best`` and ``final``."""
    window = _rounds(curve, statistic)
    return len(window) - sum(at in window for at in curve) if _WINDOW.fullmatch(statistic) else 0


def _rounds(curve: Mapping[int, float], statistic: str) -> range:
    end = max(curve, default=-1) + 1
    window = _WINDOW.fullmatch(statistic)
    if window is None:  # `best` and `final` may use every round
        return range(end)
    if window["count"] is None:
        return range(int(window["first"]), int(window["last"]) + 1)
    return range(max(0, end - int(window["count"])), end)


def first_as_good(curve: Mapping[int, float], metric: str, target: float) -> int | None:
    """Returns the first evaluated round at which a metric reaches a target; None if there is none."""
    sign = -1 if lower_is_better(metric) else 1
    return next((at for at, value in curve.items() if sign * value >= sign * target), None)
