"""Compares metrics at equal loss instead of equal rounds, and tells whether curves still improve."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from lightning_fed.lab.common import expect_known
from lightning_fed.lab.report.tables import counted
from lightning_fed.lab.studies.results import AT_EQUAL, StudyResults, StudyRun, is_lost, value_of_run
from lightning_fed.lab.studies.study import Report, Study
from lightning_fed.runs.statistics import Goal, goal_of

__all__ = ["level_columns", "still_improves", "value_of", "with_levels"]

_FIFTH, _FEWEST, _NOISE = 5, 4, 2.0

_Curve = Mapping[int, float]


def level_columns(report: Report) -> list[str]:
    """Returns the losses at which runs are compared."""
    return [name.removeprefix(AT_EQUAL) for name in report.statistic if name.startswith(AT_EQUAL)]


def value_of(run: StudyRun, statistic: str, metric: str, goal: Goal | None = None) -> float:
    """Returns a statistic of one run from ``with_levels``; NaN if it diverged or has no round with loss and metric."""
    if statistic.startswith(AT_EQUAL):
        return run.at_equal.get((metric, statistic), (0, math.nan))[1]
    return value_of_run(run.curves[metric], statistic, metric, goal)


def with_levels(study: Study, results: StudyResults) -> tuple[StudyResults, list[str]]:
    """Reads metrics at equal loss, if the report asks for it, and returns notes on the numbers.

    Runs that differ only in the baseline's axes are compared. For each seed the level is the max over runs of the min
    over rounds of the loss, which all of them reach. The metric of a run is taken at its first round at or below this
    level. Only rounds with both the loss and the metric count; nothing is interpolated.
    """
    report, notes, runs = study.report, list[str](), [*results.runs]
    measured = sorted({name for run in runs for name in run.curves})
    expect_known("report.statistic", level_columns(report), measured, "a loss that was measured after `at equal`")
    for loss in level_columns(report):
        for metric in report.metric:
            found = _first_rounds(runs, report, loss, metric)
            for at, round_ in found.items():
                read = (round_, runs[at].curves[metric][round_])
                runs[at] = replace(runs[at], at_equal={**runs[at].at_equal, (metric, AT_EQUAL + loss): read})
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
    if len(rounds) < _FEWEST or is_lost(curve):
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
