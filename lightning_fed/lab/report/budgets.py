"""Cost of a run in rounds, time or bytes: its metric within a budget, and the cost of reaching a target."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import numpy as np

from lightning_fed.errors import FederatedError, expect_number
from lightning_fed.lab.report.load import MeasuredRun, Method
from lightning_fed.lab.report.tables import is_share
from lightning_fed.runs.statistics import Goal, first_as_good, goal_of

__all__ = ["X_SUMS", "at_budget", "columns_of", "derived_columns", "is_measured", "spent", "to_target"]

# Costs that are no column themselves, with the columns whose sum they are.
X_SUMS = {"comm/bytes": ("comm/bytes_down", "comm/bytes_up"), "time": ("time/round",)}

# The costs of a target, besides x, that are shown if every run measured them.
_COSTS = ("round", "comm/bytes", "gradients", "time")


def spent(run: MeasuredRun, x: str, rounds: Sequence[int]) -> list[float]:
    """Returns the cost of a run by the end of some rounds.

    The unit is ``round``, ``time`` (cumulative, in seconds), ``comm/bytes`` (both ways) or a cumulative column.
    """
    totals = np.array(rounds, dtype=np.float64) if x == "round" else np.zeros(len(rounds))
    for column in columns_of(x):
        if column not in run.columns:
            raise FederatedError(f"Expected `--x` to name a column of every run, got {x!r}, missing in {run.path}.")
        values = list(run.columns[column].values())
        cumulative = [0.0, *(accumulate(values) if x == "time" else values)]
        # Cumulative counts start at 0, and do not change in rounds without training.
        totals += np.array(cumulative)[np.searchsorted(list(run.columns[column]), list(rounds), side="right")]
    places: list[float] = totals.tolist()
    return places


def columns_of(x: str) -> tuple[str, ...]:
    """Returns the columns of metrics.csv whose sum a cost is."""
    return () if x == "round" else X_SUMS.get(x, (x,))


def is_measured(methods: Sequence[Method], x: str) -> bool:
    """Tells whether every run has measured x."""
    return all(column in run.columns for column in columns_of(x) for method in methods for run in method.runs)


def at_budget(run: MeasuredRun, metric: str, x: str, budget: float) -> float:
    """Returns the metric at the last evaluation within a budget; NaN if no evaluation is."""
    curve = run.columns[metric]
    within = [value for value, cost in zip(curve.values(), spent(run, x, list(curve)), strict=True) if cost <= budget]
    return within[-1] if within else math.nan


def to_target(run: MeasuredRun, metric: str, x: str, target: float, goal: Goal | None = None) -> float:
    """Returns the cost up to the first evaluation that reaches the target; NaN if none does."""
    reached = first_as_good(run.columns[metric], metric, target, goal)
    return math.nan if reached is None else spent(run, x, [reached])[0]


def derived_columns(
    methods: Sequence[Method], metric: str, x: str, budget: float | None, target: float | None, goal: Goal | None = None
) -> dict[str, Callable[[MeasuredRun], float]]:
    """Returns the columns that a budget, in units of x, and a target of the metric add to the table.

    Returns:
        By name, the function that computes the column for one run. Names with ``at`` first are in the metric's unit.
    """
    columns: dict[str, Callable[[MeasuredRun], float]] = {}
    if budget is not None:
        expect_number("--budget", budget, least=0)
        columns[f"at {x} {budget:g}"] = partial(at_budget, metric=metric, x=x, budget=budget)
    if target is not None:
        values = [value for method in methods for run in method.runs for value in run.columns[metric].values()]
        low, high = (0, 1) if is_share(metric, values) else (-math.inf, math.inf)
        expect_number("--target", target, least=low, most=high)
        costs = [x, *(cost for cost in _COSTS if cost != x and is_measured(methods, cost))]
        reach = partial(to_target, metric=metric, target=target, goal=goal_of(metric, goal, "--goal"))
        columns |= {f"{cost} to {target:g}": partial(reach, x=cost) for cost in costs}
    return columns
