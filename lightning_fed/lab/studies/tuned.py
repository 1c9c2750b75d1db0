"""The trials of a tuning: a table of the choices, and a chart for each choice."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean

from lightning_fed.lab.report.plots import tuning_html
from lightning_fed.lab.report.tables import counted, is_share
from lightning_fed.lab.studies.formats import Block, column_head, without_constants
from lightning_fed.lab.studies.results import BESIDE, Trial
from lightning_fed.lab.studies.study import Study, tuned_per
from lightning_fed.runs.statistics import Goal, known_goal

__all__ = ["tuned_block", "tuning_charts"]


def tuned_block(study: Study, trials: Sequence[Trial]) -> Block:
    """Returns the options chosen by the deciding metric, and those that each other metric would have chosen."""
    axes, names = tuned_per(study), _names(trials)
    lines = [[*axes, *(word for name in names for word in (f"by {name}", name))]]
    for key, attempts in _groups(axes, trials).items():
        best = (_best(name, attempts, _goal(study, name)) for name in names)
        lines.append([*key, *(word for pair in best for word in pair)])
    seeds = len(study.tune.seeds)
    over = "one seed" if seeds == 1 else f"mean over {counted(seeds, 'seed')}"
    note = f"The runs use the first choice, by {names[0]}, {over}."
    return without_constants(Block("Tuned options", lines, len(axes), note))


def tuning_charts(study: Study, trials: Sequence[Trial]) -> list[str]:
    """Draws for each choice the deciding metric over the option with the most values, and marks the chosen trial."""
    axes, charts, names = tuned_per(study), [], _names(trials)
    for index, (key, attempts) in enumerate(_groups(axes, trials).items()):
        means, chosen = _means(names[0], attempts), _best(names[0], attempts, _goal(study, names[0]))[0]
        if not chosen:
            continue
        options = {text: attempts[text][0].options for text in means}
        pairs = {pair for one in options.values() for pair in one.items()}
        option = max(options[chosen], key=lambda name: sum(name == other for other, _ in pairs))
        lines: dict[str, list[tuple[str, float]]] = {}
        for text, mean in means.items():
            others = ", ".join(f"{name} {value}" for name, value in options[text].items() if name != option)
            lines.setdefault(others or names[0], []).append((options[text].get(option, ""), mean))
        drawn = tuning_html(lines, [(options[chosen][option], means[chosen])], option, names[0], f"tuning-{index}")
        charts.append(f"<div><h3>{escape(column_head(axes, key))}</h3>{drawn}</div>")
    return charts


def _names(trials: Sequence[Trial]) -> list[str]:
    return list(dict.fromkeys(name for trial in trials for name in trial.values))


def _groups(axes: Sequence[str], trials: Sequence[Trial]) -> dict[tuple[str, ...], dict[str, list[Trial]]]:
    """Groups the trials of the last stage, which decides, by choice and then by their options as text."""
    groups: dict[tuple[str, ...], dict[str, list[Trial]]] = {}
    keys = [tuple(trial.axes.get(axis, "") for axis in axes) for trial in trials]
    last = dict(sorted(zip(keys, (trial.stage for trial in trials), strict=True)))
    for key, trial in zip(keys, trials, strict=True):
        if trial.stage == last[key]:
            options = ", ".join(f"{option} {value}" for option, value in trial.options.items())
            groups.setdefault(key, {}).setdefault(options, []).append(trial)
    return groups


def _means(name: str, attempts: Mapping[str, Sequence[Trial]]) -> dict[str, float]:
    """Returns the mean of a value for each set of options, but only for those with the full number of runs."""
    most = max(map(len, attempts.values()))
    return {
        options: fmean([trial.values[name] for trial in trials])
        for options, trials in attempts.items()
        if len(trials) == most and all(math.isfinite(trial.values.get(name, math.nan)) for trial in trials)
    }


def _goal(study: Study, name: str) -> Goal | None:
    """Returns the goal of a value of trials: of the deciding metric, or of one that is shown beside it."""
    if name == f"{study.tune.metric} {study.tune.statistic}":
        return known_goal(study.tune.metric, study.tune.goal)
    return study.report.goal_in(name.removesuffix(BESIDE))


def _best(name: str, attempts: Mapping[str, Sequence[Trial]], goal: Goal | None) -> tuple[str, str]:
    """Returns the options with the best mean over all their runs, the first of equal ones, and this mean."""
    if not (values := _means(name, attempts)) or goal is None:
        return "", ""
    choice = (min if goal == "min" else max)(values, key=values.__getitem__)
    return choice, f"{100 * values[choice]:.2f} %" if is_share(name, [values[choice]]) else f"{values[choice]:.4g}"
