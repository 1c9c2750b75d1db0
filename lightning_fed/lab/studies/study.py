"""The definition of a study: configurations, axes whose combinations run with several seeds, tuning, a report."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NewType

from lightning_fed.errors import FederatedError, expect, expect_count
from lightning_fed.lab.attack.options import AttackOptions, expect_sound_attack
from lightning_fed.lab.common import expect_known
from lightning_fed.lab.studies.results import AT_EQUAL, RESERVED
from lightning_fed.runs.folder import is_below
from lightning_fed.runs.statistics import Goal, expect_statistic, goal_of, known_goal

__all__ = [
    "AxisValue", "Name", "PARTS", "Parameters", "Profile", "Report", "Space", "Study", "Tune", "all_parameters",
    "expect_sound", "expect_values", "name_of", "reported_axes", "tuned_per",
]  # fmt: skip

# The width of a range may be twice as large and must still be finite.
_LARGEST = 1e300

Name = NewType("Name", str)
"""The name of a value of an axis; the name of a number or ``true`` is its text."""


def name_of(value: Any) -> Name:
    """Returns the name of a value as in a file: ``0.1`` for 0.1, ``true`` for True."""
    return Name(value if isinstance(value, str) else json.dumps(value))


@dataclass(frozen=True)
class AxisValue:
    """The settings of one value of an axis: configurations, then options. They win over those of earlier axes.

    Args:
        configs: Configurations, as `--config` takes them.
        set: Options of the command line and their values.
    """

    configs: list[str] = field(default_factory=list)
    set: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Space:
    """A range of real numbers from which samplers other than `grid` draw an option; list whole numbers instead.

    Args:
        low: Smallest value.
        high: Largest value.
        log: Whether to draw uniformly on a logarithmic scale.
    """

    low: float
    high: float
    log: bool = False


Parameters = dict[str, list[Any] | Space]
"""Tuned options, each with a list of values or a range."""


@dataclass(frozen=True)
class Tune:
    """The tuning, by runs of its own before the others: by a validation metric, never by a test metric.

    Args:
        parameters: Options to tune, each with a list of values or a range of `low`, `high` and `log`.
        by: Further options for some values of an axis, as in `{rule: {FedProx: {client.mu: [0.01, 0.1]}}}`.
        metric: Column of metrics.csv that decides; it must be of a validation set.
        goal: Whether its smallest (`min`) or its largest value (`max`) is the best (default: by its name).
        statistic: Statistic of this metric over the rounds, as in `report`.
        seeds: Seeds of the tuning runs; the mean over them decides.
        per: Axes with a separate choice for each combination of their values (default: all).
        at: Values of the other axes while tuning. For axes that are not named the mean over all values decides.
        sampler: How values are proposed: `grid` tries all combinations, `tpe` is Optuna's estimator.
        trials: Largest number of combinations for each choice; of a grid the first ones (default: all).
        pruner: With `median`, a run stops if its best value is worse than the median of other trials; it compares
            after a fifth of the rounds.
        storage: Address of a database, as `postgresql://user@host/name`, or a file below the runs' folder (default: the
            journal `tuning.log` in it).
        stages: Lists of tuned options, searched one list after the other; the other options keep the choice of the
            stage before (default: one stage with all options). A choice skips a stage that has none of its options.
        start: Values of axes; the first stage of all other values starts from their choice, as in `{rule: FedAvg}`.
    """

    parameters: Parameters = field(default_factory=dict)
    by: dict[str, dict[str, Parameters]] = field(default_factory=dict)
    metric: str = "val/acc"
    goal: Goal | None = None
    statistic: str = "best"
    seeds: list[int] = field(default_factory=lambda: [0])
    per: list[str] | None = None
    at: dict[str, Name] = field(default_factory=dict)
    sampler: Literal["grid", "tpe"] = "grid"
    trials: int | None = None
    pruner: Literal["none", "median"] = "none"
    storage: str | None = None
    stages: list[list[Name]] = field(default_factory=list)
    start: dict[str, Name] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The report on the runs.

    Args:
        metric: Column of metrics.csv, or several.
        goal: Whether the smallest (`min`) or the largest value (`max`) of the first metric is the best, or of each of
            some metrics (default: what a metric object has said in the runs, else by the name).
        statistic: One or several statistics over the rounds: `best`, `final`, `last 10`, `last 50 %` or `rounds
            171-200` (means), or `at equal train/loss`: at each run's first round at a level of that loss that all
            compared runs reach.
        rows: Axes of the table's rows (default: all that are not columns); also `seed`, `metric` and `statistic`.
        columns: Axes of the table's columns.
        baseline: Values of axes; the other runs are compared with the runs that have these values, paired by seed.
        against: For some metrics, the baseline's metric that they are compared with (default: the same), as in
            `{per_client/own/acc: per_client/tuned/acc}`.
        pool: Axes over whose cells a further row takes the mean difference of each seed, with its power.
        published: Published figures next to those of the runs: a `file`; `where`, its columns that have the same value
            for all cells; and `axes`, the column of each axis.
        target: Value of the first metric, an accuracy in [0, 1]; a table has the rounds until it is reached.
        x: Column for the x-axis of curves.
        gain: The smallest gain of interest if none is published, in the unit of the first metric (an accuracy in
            [0, 1]), negative if less is better; or a gain for each of some metrics. A verdict on each difference says
            whether a method is ahead, ahead by less than this gain, level or behind.
        learned: Value that the baseline must have reached for its cells to be compared, in the same unit.
        plateau: Whether a note says how many runs still improve over the last fifth of their rounds.
    """

    metric: list[Name] = field(default_factory=lambda: [Name("test/acc")])
    goal: Goal | dict[str, Goal] | None = None
    statistic: list[Name] = field(default_factory=lambda: [Name("best")])
    rows: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    baseline: dict[str, Name] = field(default_factory=dict)
    against: dict[str, str] = field(default_factory=dict)
    pool: list[str] = field(default_factory=list)
    published: dict[str, Any] = field(default_factory=dict)
    target: float | None = None
    x: str = "round"
    gain: float | dict[str, float] | None = None
    learned: float | None = None
    plateau: bool = False

    def gain_in(self, metric: str) -> float:
        """Returns the smallest gain of interest in a metric, 0 where none is given."""
        if isinstance(self.gain, dict):
            return self.gain.get(metric, 0.0)
        return self.gain or 0.0 if metric == self.metric[0] else 0.0

    def goal_in(self, metric: str) -> Goal | None:
        """Returns whether the smallest or the largest value of a metric is the best, None if nobody knows."""
        return known_goal(metric, self._said().get(metric))

    def with_goals(self, recorded: Mapping[str, Goal]) -> "Report":
        """Returns the report with the goals that runs have recorded, where it says no other."""
        return replace(self, goal={**recorded, **self._said()})

    def _said(self) -> dict[str, Goal]:
        return self.goal if isinstance(self.goal, dict) else {self.metric[0]: self.goal} if self.goal else {}


@dataclass(frozen=True)
class Profile:
    """Another size of the study, as changes to the file, which itself is the profile `full`.

    Args:
        why: What this size leaves out, and what can still be compared.
        configs: Further configurations, which win over those of the study.
        set: Further options, which win over those of the study.
        seeds: Other seeds.
        axes: The values to keep of some axes.
        by: Settings for some values of an axis, which win over all other settings of the value, as in
            `{epochs: {10: {set: {trainer.local_steps: 100}}}}`.
        parameters: Other values or ranges for some tuned options.
        stages: Other stages of the tuning.
        start: Another start of the first stage.
    """

    why: str = ""
    configs: list[str] = field(default_factory=list)
    set: dict[str, Any] = field(default_factory=dict)
    seeds: list[int] | None = None
    axes: dict[str, list[Name]] = field(default_factory=dict)
    by: dict[str, dict[str, AxisValue]] = field(default_factory=dict)
    parameters: Parameters = field(default_factory=dict)
    stages: list[list[Name]] = field(default_factory=list)
    start: dict[str, Name] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """A comparison: one run for each combination of all axes and each seed.

    Args:
        title: The question of the study.
        name: Name of the folder of its runs (default: name of the file).
        source: Where the experiment is published.
        open: Details that the source leaves open, and how you chose them.
        configs: Configurations, as for `--config`: names or paths; later ones win.
        set: Options of every run, as on the command line: `{trainer.max_rounds: 40}`. `{seed}` in a value is its seed.
        axes: For each axis, by name, its values by name with their settings. The short form for one option is
            `client rate: {option: model.optimizer.lr, values: [0.01, 0.1]}`.
        without: Combinations that are left out, such as `{rule: FedAvg, client rate: [0.01]}`.
        seeds: Seeds; each gives one run of every combination.
        tune: The tuning before the runs.
        attack: Options of a membership inference attack on the model of each run, `{}` for their defaults. Its figures
            are columns such as `attack/loss/auc` (default: no attack).
        report: The report.
        profiles: Other sizes of the study, by name.
    """

    title: str
    name: str = ""
    source: str = ""
    open: list[str] = field(default_factory=list)
    configs: list[str] = field(default_factory=list)
    set: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, dict[str, AxisValue]] = field(default_factory=dict)
    without: list[dict[str, list[Name]]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=lambda: [0])
    tune: Tune = field(default_factory=Tune)
    attack: AttackOptions | None = None
    report: Report = field(default_factory=Report)
    profiles: dict[str, Profile] = field(default_factory=dict)


PARTS = {
    "A study": Study, "A value of `axes`": AxisValue, "`tune`": Tune, "A range in `tune.parameters`": Space,
    "`attack`": AttackOptions, "`report`": Report, "A profile in `profiles`": Profile,
}  # fmt: skip
"""The classes of a study's file, by what they are in it."""


def all_parameters(tune: Tune) -> list[Parameters]:
    """Returns the tuned parameters, then those for single values of axes."""
    return [tune.parameters, *(parameters for values in tune.by.values() for parameters in values.values())]


def expect_sound(study: Study) -> None:
    """Refuses a study that names unknown axes, values or options, or that is tuned by a test metric."""
    # Names must not lead out of the folder of runs, and must not add a line to a script or a table.
    for place, names in (("name", [study.name]), ("profiles", study.profiles)):
        if wrong := [name for name in names if not is_below(name)]:
            raise FederatedError(f"Expected `{place}` to name a folder below `--output`, got {wrong[0]!r}.")
    if wrong := [name for axis in study.axes for name in (axis, *study.axes[axis]) if not name.isprintable()]:
        raise FederatedError(f"Expected `axes` and their values to have names on one line, got {wrong[0]!r}.")
    for axis, values in study.axes.items():
        taken = (*RESERVED, *study.report.metric)
        sound = bool(values) and axis not in taken
        expect(sound, f"Expected `axes` to have values, under names other than {', '.join(taken)}, got {axis!r}.")
    for place, seeds in (("seeds", study.seeds), ("tune.seeds", study.tune.seeds)):
        sound = bool(seeds) and len({*seeds}) == len(seeds) and min(seeds) >= 0
        expect(sound, f"Expected `{place}` to be one or more different integers of at least 0, got {seeds}.")
    if "seed_everything" in study.set:
        raise FederatedError("Expected the seeds of runs in `seeds`, got `set.seed_everything`: move it there.")
    if "full" in study.profiles:
        raise FederatedError("Expected `profiles` to have names other than full, which is the file itself.")
    for one in study.without:
        expect_values("without", study, one)
    if study.attack is not None:
        expect_sound_attack(study.attack, "attack.")
    _expect_sound_report(study)
    _expect_sound_tuning(study)


def _expect_sound_report(study: Study) -> None:
    report = study.report
    for place, axes in (("report.rows", report.rows), ("report.columns", report.columns)):
        expect_known(place, axes, reported_axes(study), "axes of the study")
    for key in ("metric", "statistic", "rows", "columns"):
        names = getattr(report, key)
        expect(len({*names}) == len(names), f"Expected `report.{key}` to name each once, got {', '.join(names)}.")
    for statistic in report.statistic:
        if statistic.startswith(AT_EQUAL):
            expect(report.baseline, f"Expected `report.baseline` with the statistic {statistic!r}, got none.")
        else:
            expect_statistic("report.statistic", statistic)
    expect_values("report.baseline", study, report.baseline)
    others = [axis for axis in study.axes if axis not in report.baseline]
    expect_known("report.pool", report.pool, others, "axes that are not the baseline's")
    named = {"report.against": [*report.against, *report.against.values()]}
    named |= {f"report.{key}": [*one] for key in ("gain", "goal") if isinstance(one := getattr(report, key), dict)}
    for place, metrics in named.items():
        expect_known(place, metrics, report.metric, "metrics of `report.metric`")


def _expect_sound_tuning(study: Study) -> None:
    tune = study.tune
    per = tuned_per(study)
    others = [axis for axis in study.axes if axis not in per]
    expect_known("tune.per", tune.per or [], study.axes, "axes of the study")
    expect_statistic("tune.statistic", tune.statistic)
    expect_values("tune.at", study, tune.at)
    expect_values("tune.by", study, tune.by)
    expect_known("tune.at", tune.at, others, "axes that are not in `tune.per`")
    expect_known("tune.by", tune.by, per, "axes of `tune.per`")
    if any(all_parameters(tune)):
        goal_of(tune.metric, tune.goal, "tune.goal")
    if tune.metric.startswith(("test", "train", "attack")):
        raise FederatedError(f"Expected `tune.metric` to be of a validation set, got {tune.metric!r}.")
    if tune.trials is not None:
        expect_count("tune.trials", tune.trials)
    if tune != Tune() and not any(all_parameters(tune)):
        raise FederatedError("Expected `tune.parameters`, or `tune.by`, to name options to choose, got none.")
    expect_values("tune.start", study, tune.start)
    expect_known("tune.start", tune.start, per, "axes of `tune.per`")
    for parameters in all_parameters(tune):
        for option, choices in parameters.items():
            _expect_choices(option, choices, tune.sampler)


def _expect_choices(option: str, choices: list[Any] | Space, sampler: str) -> None:
    place = "Expected `tune.parameters` to"
    if isinstance(choices, Space):
        low, high = choices.low, choices.high
        if not -_LARGEST <= low < high <= _LARGEST or (choices.log and low <= 0):
            raise FederatedError(
                f"{place} have a range of {option!r} from `low` to a larger `high` within ±{_LARGEST:g}, above 0 with "
                f"`log`, got {low} to {high}."
            )
        if sampler == "grid":
            raise FederatedError(f"{place} list values of {option!r} for `sampler: grid`, got a range.")
    elif not choices or len({name_of(value) for value in choices}) < len(choices):
        raise FederatedError(f"{place} list values of {option!r}, at least one and each once, got {choices}.")


def expect_values(place: str, study: Study, chosen: Mapping[str, str | Iterable[str]]) -> None:
    """Refuses axes, and one or several values of each, that the study does not have."""
    expect_known(place, chosen, study.axes, "axes of the study")
    for axis, values in chosen.items():
        expect_known(place, [values] if isinstance(values, str) else values, study.axes[axis], f"values of {axis!r}")


def reported_axes(study: Study) -> dict[str, list[str]]:
    """Returns the axes that rows and columns of a table can have, with the names of their values."""
    report = study.report
    axes = {axis: list[str](values) for axis, values in study.axes.items()}
    seeds = [str(seed) for seed in study.seeds]
    return {**axes, "seed": seeds, "metric": [*report.metric], "statistic": [*report.statistic]}


def tuned_per(study: Study) -> list[str]:
    """Returns the axes with a separate tuned choice for each combination, in the order of the file."""
    return [axis for axis in study.axes if study.tune.per is None or axis in study.tune.per]
