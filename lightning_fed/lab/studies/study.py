"""What a study is: configurations, axes whose combinations are run over seeds, tuning, and a report."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NewType

from lightning_fed.errors import FederatedError, expect_choice, expect_count
from lightning_fed.lab.attack.options import AttackOptions, expect_sound_attack
from lightning_fed.lab.common import expect_known
from lightning_fed.lab.studies.results import AT_EQUAL, RESERVED
from lightning_fed.runs.folder import is_below
from lightning_fed.runs.statistics import expect_statistic

__all__ = [
    "AxisValue", "Name", "Profile", "Report", "Space", "Study", "Tune", "all_parameters", "apply_profile",
    "expect_sound", "name_of", "reported_axes", "tuned_per",
]  # fmt: skip

# Twice as much is still a number, as the width of a range has to be.
_LARGEST = 1e300

Name = NewType("Name", str)
"""The name of a value of an axis; a number or ``true`` stands for itself as text."""


def name_of(value: Any) -> Name:
    """Returns the name of a value as a file has it: ``0.1`` of 0.1, ``true`` of True."""
    return Name(value if isinstance(value, str) else json.dumps(value))


@dataclass(frozen=True)
class AxisValue:
    """The settings of one value of an axis: configurations, then options; they win over those of earlier axes.

    Args:
        configs: Configurations, as `--config` takes them.
        set: Options of the command line and their values.
    """

    configs: list[str] = field(default_factory=list)
    set: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Space:
    """A range of real numbers that samplers other than `grid` draw an option from; whole numbers are listed.

    Args:
        low: Least value.
        high: Largest value.
        log: Whether it is drawn evenly by its logarithm.
    """

    low: float
    high: float
    log: bool = False


Parameters = dict[str, list[Any] | Space]
"""Tuned options, each with the values to choose from or a range."""


@dataclass(frozen=True)
class Tune:
    """What is tuned, by runs of their own before the others: by a validation metric, never a test metric.

    Args:
        parameters: Options, each with its values to choose from, or with a range of `low`, `high` and `log`.
        by: Further such options for some values of an axis, as in `{rule: {FedProx: {client.mu: [0.01, 0.1]}}}`.
        metric: Column of metrics.csv of a validation set that decides.
        statistic: What of its rounds decides, as in `report`.
        seeds: Seeds of these runs, over which the mean decides.
        per: Axes for each of whose combinations there is a choice of its own (default: all).
        at: Values at which the other axes are kept while tuning; over those that are not named the mean decides.
        sampler: Who proposes values: `grid` all combinations, `tpe` as Optuna's estimator says.
        trials: Most combinations to try for each choice: of a grid the first ones, all by default.
        pruner: With `median` stops runs whose best is worse than the median of the others, after a fifth of the rounds.
        storage: URL of Optuna's database, as `postgresql://user@host/name` (default: a journal in the runs' folder).
        stages: Lists of tuned options. One after the other each is searched, the others as the stage before has chosen
            them (default: one stage of all). A choice passes over a stage that has none of its options.
        start: Values of axes whose choice the first stage of all others starts from, such as `{rule: FedAvg}`.
    """

    parameters: Parameters = field(default_factory=dict)
    by: dict[str, dict[str, Parameters]] = field(default_factory=dict)
    metric: str = "val/acc"
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
    """What is reported of the runs.

    Args:
        metric: Column of metrics.csv, or several.
        statistic: What of its rounds, or several: `best`, `final`, `last 10`, `rounds 171-200` (the mean of those), or
            `at equal train/loss`, where all that is compared has first fallen to one level of that loss.
        rows: Axes of the table's rows (default: those that are not columns), also `seed`, `metric` and `statistic`.
        columns: Axes of its columns.
        baseline: Values of axes whose runs the others are compared with, paired by seed.
        published: Figures of a paper beside those of the runs: a `file`; `where`, columns of it that are the same for
            all cells; and `axes`, the column that each axis is.
        target: Value of the first metric, an accuracy as a share of 1; a table has the rounds until it is reached.
        x: Column that curves are drawn over.
        gain: The smallest gain of interest, where none is published: in the unit of the first metric, an accuracy as a
            share of 1, below 0 where less is better. A verdict on each difference says whether it is reproduced.
        learned: What the baseline must have reached for its cells to be compared, in the same unit.
        plateau: Whether a note says how many runs still improve over the last fifth of their rounds.
    """

    metric: list[Name] = field(default_factory=lambda: [Name("test/acc")])
    statistic: list[Name] = field(default_factory=lambda: [Name("best")])
    rows: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    baseline: dict[str, Name] = field(default_factory=dict)
    published: dict[str, Any] = field(default_factory=dict)
    target: float | None = None
    x: str = "round"
    gain: float | None = None
    learned: float | None = None
    plateau: bool = False


@dataclass(frozen=True)
class Profile:
    """A study of another size: what it changes of the file as it stands, which is the profile `full`.

    Args:
        why: What it leaves out, and what the comparison keeps.
        configs: Further configurations, which win over those of the study.
        set: Further options, which win over those of the study.
        seeds: Other seeds.
        axes: Values that are left of some axes.
        by: Settings for the runs of some values of an axis, which win over all others of that value, as in
            `{epochs: {10: {set: {trainer.local_steps: 100}}}}`.
        parameters: Other values, or ranges, of some tuned options.
        stages: Other stages of the tuning.
        start: Another start of its first stage.
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
        title: What is asked.
        name: Name of its folder of runs; that of the file by default.
        source: Where the experiment is published.
        open: What the source leaves open, and how it is chosen here.
        configs: Configurations, as for `--config`: names or paths; later ones win.
        set: Options of every run and their values, as on the command line: `{trainer.max_rounds: 40}`.
        axes: By name of an axis, by name of a value: its settings. The short form for one option is
            `client rate: {option: model.optimizer.lr, values: [0.01, 0.1]}`.
        without: Combinations that are left out, such as `{rule: FedAvg, client rate: [0.01]}`.
        seeds: A run for each.
        tune: What is tuned before.
        attack: Options of a membership inference attack on the model of each run, `{}` for their defaults; its figures
            are columns such as `attack/loss/auc` (default: no attack).
        report: What is reported.
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


def apply_profile(study: Study, name: str) -> Study:
    """Returns the study in another size; ``full`` is the study as it is."""
    expect_choice("--profile", name, ["full", *study.profiles])
    if name == "full":
        return study
    profile = study.profiles[name]
    _expect_values(f"profiles.{name}.axes", study, profile.axes)
    _expect_values(f"profiles.{name}.by", study, profile.by)
    tuned = sorted({option for parameters in all_parameters(study.tune) for option in parameters})
    expect_known(f"profiles.{name}.parameters", profile.parameters, tuned, "tuned options")
    axes = {
        axis: {
            value: _over(values[value], profile.by.get(axis, {}).get(value, AxisValue()))
            for value in profile.axes.get(axis, values)
        }
        for axis, values in study.axes.items()
    }
    by = {
        axis: {v: _other_parameters(p, profile.parameters) for v, p in values.items() if v in axes[axis]}
        for axis, values in study.tune.by.items()
    }
    without = [{axis: [v for v in names if v in axes[axis]] for axis, names in one.items()} for one in study.without]
    return replace(
        study,
        configs=[*study.configs, *profile.configs],
        set={**study.set, **profile.set},
        seeds=study.seeds if profile.seeds is None else profile.seeds,
        axes=axes,
        without=[one for one in without if all(one.values())],
        tune=replace(
            study.tune,
            parameters=_other_parameters(study.tune.parameters, profile.parameters),
            by=by,
            stages=profile.stages or study.tune.stages,
            start=profile.start or study.tune.start,
        ),
    )


def _over(value: AxisValue, other: AxisValue) -> AxisValue:
    return AxisValue([*value.configs, *other.configs], {**value.set, **other.set})


def _other_parameters(parameters: Parameters, others: Parameters) -> Parameters:
    return {option: others.get(option, values) for option, values in parameters.items()}


def all_parameters(tune: Tune) -> list[Parameters]:
    """Returns what is tuned, and what for some values of axes besides."""
    return [tune.parameters, *(parameters for values in tune.by.values() for parameters in values.values())]


def expect_sound(study: Study) -> None:
    """Refuses a study that names what it does not have, or is tuned by what it is reported by."""
    # Names must not lead out of the folder of runs, or add a line to a script or a table.
    for place, names in (("name", [study.name]), ("profiles", study.profiles)):
        if wrong := [name for name in names if not is_below(name)]:
            raise FederatedError(f"Expected `{place}` to name a folder below that of `--output`, got {wrong[0]!r}.")
    if wrong := [name for axis in study.axes for name in (axis, *study.axes[axis]) if not name.isprintable()]:
        raise FederatedError(f"Expected `axes` and their values to have names on one line, got {wrong[0]!r}.")
    for axis, values in study.axes.items():
        if axis in (taken := (*RESERVED, *study.report.metric)) or not values:
            raise FederatedError(
                f"Expected `axes` to have values, under names other than {', '.join(taken)}, got {axis!r}."
            )
    for place, seeds in (("seeds", study.seeds), ("tune.seeds", study.tune.seeds)):
        if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
            raise FederatedError(f"Expected `{place}` to be different numbers from 0, at least one, got {seeds}.")
    if "seed_everything" in study.set:
        raise FederatedError("Expected `seeds` to say the seeds of runs, got `set.seed_everything`: move it there.")
    if "full" in study.profiles:
        raise FederatedError("Expected `profiles` under names other than full, which is the file as it stands.")
    for one in study.without:
        _expect_values("without", study, one)
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
        if len(set(names)) < len(names):
            raise FederatedError(f"Expected `report.{key}` to name each once, got {', '.join(names)}.")
    for statistic in report.statistic:
        if not statistic.startswith(AT_EQUAL):
            expect_statistic("report.statistic", statistic)
        elif not report.baseline:
            raise FederatedError(f"Expected `report.baseline` with the statistic {statistic!r}, got none.")
    _expect_values("report.baseline", study, {axis: [value] for axis, value in report.baseline.items()})


def _expect_sound_tuning(study: Study) -> None:
    tune = study.tune
    per = tuned_per(study)
    others = [axis for axis in study.axes if axis not in per]
    expect_known("tune.per", tune.per or [], study.axes, "axes of the study")
    expect_statistic("tune.statistic", tune.statistic)
    _expect_values("tune.at", study, {axis: [value] for axis, value in tune.at.items()})
    _expect_values("tune.by", study, tune.by)
    expect_known("tune.at", tune.at, others, "axes that are not in `tune.per`")
    expect_known("tune.by", tune.by, per, "axes of `tune.per`")
    if tune.metric.startswith(("test", "train", "attack")):
        raise FederatedError(f"Expected `tune.metric` to be of a validation set, got {tune.metric!r}.")
    if tune.trials is not None:
        expect_count("tune.trials", tune.trials)
    if tune != Tune() and not any(all_parameters(tune)):
        raise FederatedError("Expected `tune.parameters`, or `tune.by`, to name options to choose, got none.")
    _expect_values("tune.start", study, {axis: [value] for axis, value in tune.start.items()})
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


def _expect_values(place: str, study: Study, chosen: Mapping[str, Iterable[str]]) -> None:
    expect_known(place, chosen, study.axes, "axes of the study")
    for axis, values in chosen.items():
        expect_known(place, values, study.axes[axis], f"values of {axis!r}")


def reported_axes(study: Study) -> dict[str, list[str]]:
    """Returns what the rows and columns of a table can be of, with the names of the values of each."""
    report = study.report
    axes = {axis: list[str](values) for axis, values in study.axes.items()}
    seeds = [str(seed) for seed in study.seeds]
    return {**axes, "seed": seeds, "metric": [*report.metric], "statistic": [*report.statistic]}


def tuned_per(study: Study) -> list[str]:
    """Returns the axes for each of whose combinations there is a choice of its own, in the order of the file."""
    return [axis for axis in study.axes if study.tune.per is None or axis in study.tune.per]
