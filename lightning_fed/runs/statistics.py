"""One number for a run: the best of its evaluations, the last, or the mean over a window of rounds."""

import math
import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal, TypeAlias

from lightning_fed.errors import FederatedError

__all__ = [
    "Goal", "LAST", "expect_statistic", "first_as_good", "goal_of", "goals_in", "is_reached", "known_goal",
    "mean_of", "missing_rounds", "number_in", "run_statistic", "words_of",
]  # fmt: skip

LAST = 10
"""The number of last rounds whose mean is reported."""

_LARGEST = 1e300
_WINDOW = re.compile(r"last (?P<share>[1-9]\d?|100) %|last (?P<count>[1-9]\d*)|rounds (?P<first>\d+)-(?P<last>\d+)")


Goal: TypeAlias = Literal["min", "max"]
"""Whether the smallest or the largest value of a metric is the best."""

_LESS = """loss losses logloss error errors err mse rmse mae mape smape msle rmsle nll bce ce crossentropy xent
    perplexity ppl bpc bpd wer cer mer kl fid kid lpips ece brier hinge regret fpr fnr eer cost latency duration time
    seconds bytes dissimilarity distance std"""
_MORE = """acc accuracy accuracies auc auroc auprc rocauc prauc ap map mrr ndcg f1 fbeta r2 precision recall specificity
    sensitivity tpr tnr iou miou union jaccard dice mcc kappa bleu rouge psnr ssim top1 top5 pearson spearman reward"""
_GOALS: dict[str, Goal] = {**dict.fromkeys(_LESS.split(), "min"), **dict.fromkeys(_MORE.split(), "max")}
# What follows these is no longer what is measured: ``time_to_acc``. With one of the others a name says something else.
_RELATIONS = {*"at to of per by for from in out on with without under over vs".split()}  # noqa: SIM905
_TURNS = {*"neg negative minus inverse inv not no non gap drop diff difference delta variance".split()}  # noqa: SIM905


def words_of(name: str) -> list[str]:
    """Splits a name into words in small letters: ``val/MeanSquaredError`` has val, mean, squared and error."""
    return [word.lower() for word in re.findall(r"(?:[A-Z]+(?![a-z])|[A-Z]?[a-z]+)\d*", name)]


def known_goal(metric: str, said: Goal | None = None) -> Goal | None:
    """Returns the goal of a metric: what an option or its class has ``said``, else by its name; None if nobody knows.

    The first part of the name, between slashes, that has a known word decides, so that sets may have any name:
    ``test/acc/night-time`` is an accuracy. In it the last such word does: ``acc_std`` is a deviation.
    """
    for part in () if said else metric.split("/"):
        words = words_of(part)
        goal: Goal | None = "min" if part == "attack" else None
        for word in words:
            if goal and word in _RELATIONS:
                break
            goal = _GOALS.get(word, _GOALS.get(word.rstrip("0123456789"), goal))
        if goal:
            return None if part.startswith("1-") or _TURNS.intersection(words) else goal
    return said


def goals_in(facts: Mapping[str, object]) -> dict[str, Goal]:
    """Returns the goals of metrics that a file holds."""
    known: tuple[Goal, ...] = "min", "max"
    return {name: goal for name, said in facts.items() for goal in known if said == goal}


def goal_of(metric: str, said: Goal | None, option: str) -> Goal:
    """Returns the goal of a metric, as ``known_goal`` does; if nobody knows it, a refusal names the ``option``."""
    if goal := known_goal(metric, said):
        return goal
    raise FederatedError(
        f"Expected `{option}` to say whether the smallest (min) or the largest (max) value of {metric!r} is the best, "
        "as its name does not, got none."
    )


def number_in(cell: str) -> float:
    """Reads a number from a table; one that is too large to be added to others is infinite."""
    value = float(cell)
    return math.copysign(math.inf, value) if abs(value) > _LARGEST else value


def mean_of(values: Sequence[float]) -> float:
    """Returns the mean of at least one number; NaN if they are infinite in both directions."""
    return math.nan if {math.inf, -math.inf} <= {*values} else fmean(values)


def expect_statistic(option: str, value: str) -> None:
    """Refuses a text that is not the name of a statistic."""
    window = _WINDOW.fullmatch(value)
    ordered = window is None or window["first"] is None or int(window["first"]) <= int(window["last"])
    if not ordered or (window is None and value not in ("best", "final")):
        raise FederatedError(
            f"Expected `{option}` to be `best`, `final`, `last 10` (rounds), `last 50 %` or a window such as `rounds "
            f"171-200`, got {value!r}."
        )


def run_statistic(curve: Mapping[int, float], statistic: str, metric: str, goal: Goal | None = None) -> float:
    """Returns a statistic of one run, in the metric's unit; NaN if none of its rounds was evaluated.

    Of values by evaluated round, in ascending order, it is the ``best`` without NaN; the ``final`` one; ``last N``, the
    mean over those of the last N rounds, ``last N %`` over that share of the rounds; or ``rounds A-B``, the mean over
    those in the window. ``goal`` is that of a metric whose name does not say it.
    """
    if statistic == "final":
        return curve[max(curve)] if curve else math.nan
    if statistic == "best":
        better = min if goal_of(metric, goal, "goal") == "min" else max
        return better((value for value in curve.values() if not math.isnan(value)), default=math.nan)
    window = _rounds(curve, statistic)
    values = [value for at, value in curve.items() if at in window]
    return mean_of(values) if values else math.nan


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
    if window["first"] is not None:
        return range(int(window["first"]), int(window["last"]) + 1)
    # Round 0 is before any training, and no round of a share; the last round always is one.
    count = int(window["count"] or max(1, (end - 1) * int(window["share"]) // 100))
    return range(max(0, end - count), end)


def first_as_good(curve: Mapping[int, float], metric: str, target: float, goal: Goal | None = None) -> int | None:
    """Returns the first evaluated round at which a metric reaches a target; None if there is none."""
    sign = -1 if goal_of(metric, goal, "goal") == "min" else 1
    return next((at for at, value in curve.items() if sign * value >= sign * target), None)
