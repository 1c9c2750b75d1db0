"""Tuning with Optuna: trials are ordinary runs of the study, and a validation metric chooses among them."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from lightning_fed.core.files import writing
from lightning_fed.errors import FederatedError, expect, import_extra
from lightning_fed.lab.common import expect_known
from lightning_fed.lab.runner.executors import Outcome
from lightning_fed.lab.runner.record import measured_run
from lightning_fed.lab.runner.storage import expect_below, optuna_storage
from lightning_fed.lab.studies.cells import Cell, Watch, combinations, folder_of, make_cell, parameters_of
from lightning_fed.lab.studies.results import is_lost
from lightning_fed.lab.studies.study import Name, Parameters, Space, Study, all_parameters, tuned_per
from lightning_fed.runs.statistics import Goal, goal_of, mean_of, run_statistic

if TYPE_CHECKING:
    import optuna

__all__ = [
    "Attempt", "Group", "expect_sound_stages", "groups_of", "key_of", "tune", "tuned_together", "value_of",
    "with_choices",
]  # fmt: skip

_JOURNAL, _LOCK = "tuning.log", "tuning.lock"


@dataclass(frozen=True)
class Attempt:
    """A trial: its number in Optuna's study, its options, and its runs."""

    number: int
    options: dict[str, Any]
    cells: tuple[Cell, ...]


class Group:
    """Combinations of a study that share one choice of options; a trial has a run for each member.

    Without ``writes``, new trials go only into a copy in memory.
    """

    def __init__(
        self, study: Study, values: dict[str, Name], members: list[dict[str, Name]], root: Path, writes: bool = True,
        stage: int = 0, before: "Group | None" = None,
    ) -> None:  # fmt: skip
        self.values, self._study, self._members, self._root, self._writes = values, study, members, root, writes
        self.stage, self._before, self._over, self._tried = stage, before, False, set[int]()
        self._known, self._fixed = parameters_of(study, values), dict[str, Any]()
        self._parameters = _searched(study, self._known, stage)
        self._storage = study.tune.storage or str(root / _JOURNAL)
        self._file = expect_below(root, self._storage)
        expect(members, f"Expected `tune.at` to leave some combinations of {folder_of(values)}, got none.")

    def asked(self) -> list[Attempt]:
        """Returns the trials so far, without those that were ended early or are still waiting."""
        trials = self._trials() if self._takes_over() else []
        return [self._attempt(trial) for trial in trials if trial.state.name != "PRUNED"]

    def _trials(self) -> "list[optuna.trial.FrozenTrial]":
        """Returns the trials that have all options; a process that was killed may have left others."""
        trials = [trial for trial in self._optuna.trials if trial.state.name != "WAITING"]
        return [trial for trial in trials if self._parameters.keys() <= _params_of(trial).keys()]

    def planned(self, most: int) -> list[Attempt]:
        """Returns the trials so far, or the first trials if there are none."""
        if self._before is None and not self.asked():
            self.ask(most)
        return self.asked()

    def fresh(self, most: int) -> list[Attempt]:
        """Returns trials that it has not returned before, and asks the sampler for new ones if needed."""
        if self._before is not None and not (self._before._over and self._takes_over()):
            return []
        for _ in range(2):
            if fresh := [attempt for attempt in self.asked() if attempt.number not in self._tried]:
                self._tried |= {attempt.number for attempt in fresh}
                return fresh
            self.ask(most)
        self._over = True
        return []

    def _takes_over(self) -> bool:
        """Fixes the options that the stage before has chosen; returns False if it has not chosen yet."""
        if self._before is None:
            return True
        choice = self._before.choice()
        if choice is None:
            return False
        kept = self._known.keys() - self._parameters.keys()
        fixed = {name: value for name, value in choice.options.items() if name in kept}
        if fixed != self._fixed:  # other fixed options have other trials
            self._fixed, self._tried = fixed, set()
            self.__dict__.pop("_optuna", None)
        return True

    @property
    def _seed(self) -> int:
        return _number_of([self._parameters, self._fixed] if self._fixed else self._parameters)

    def ask(self, most: int) -> None:
        """Asks the sampler for further trials: the rest of the grid, or at most ``most`` at a time."""
        tuning, choices = self._study.tune, [v for v in self._parameters.values() if isinstance(v, list)]
        grid = math.prod(map(len, choices)) if len(choices) == len(self._parameters) else None
        if (limit := tuning.trials or grid) is None:
            raise FederatedError("Expected `tune.trials`, as ranges have no last value to try, got none.")
        lock = FileLock(self._root / _LOCK) if self._writes else nullcontext()
        with writing(self._root / _LOCK, "--output"), lock:  # a second start now would ask for the same trials
            left = min(limit, grid or limit) - len(self._trials())
            if tuning.sampler == "grid":  # Optuna's sampler would end the study
                for values in product(*map(_texts, choices)):
                    self._optuna.enqueue_trial(dict(zip(self._parameters, values, strict=True)), skip_if_exists=True)
            for _ in range(left if tuning.sampler == "grid" else min(left, most)):
                # Seeded by the number of trials, so that a resumed tuning asks for the same trials as before.
                self._optuna.sampler = _import().samplers.TPESampler(seed=self._seed + len(self._optuna.trials))
                self._optuna.ask(self._distributions())

    def tell(self, attempt: Attempt, early: bool = False) -> None:
        """Tells the sampler the result of a trial; a failed trial stays open, to be tried again."""
        if early:
            self._optuna.tell(attempt.number, state=_import().trial.TrialState.PRUNED, skip_if_finished=True)
            return
        value = value_of(self._study, self._root, attempt)
        if math.isfinite(value):
            self._optuna.tell(attempt.number, value, skip_if_finished=True)

    def choice(self) -> Attempt | None:
        """Returns the trial with the best mean over its runs, the first of equal ones; None if no trial is done."""
        found = [(value_of(self._study, self._root, attempt), attempt) for attempt in self.asked()]
        done = [one for one in found if math.isfinite(one[0])]
        better = min if self._goal == "min" else max
        return better(done, key=lambda one: one[0])[1] if done else None

    @property
    def _goal(self) -> Goal:
        return goal_of(self._study.tune.metric, self._study.tune.goal, "tune.goal")

    def _attempt(self, trial: "optuna.trial.FrozenTrial") -> Attempt:
        values = _params_of(trial).items()
        chosen = {name: json.loads(value) if isinstance(value, str) else value for name, value in values}
        chosen |= self._fixed
        options = {name: chosen[name] for name in self._known if name in chosen}
        seeds = self._study.tune.seeds
        study = replace(self._study, attack=None)  # an attack takes time, and has no influence on the choice
        cells = [make_cell(study, axes, seed, options) for axes in self._members for seed in seeds]
        if self._study.tune.pruner == "median" and trial.state.name == "RUNNING":
            storage, name = self._storage, self._optuna.study_name
            cells = [
                replace(cell, watch=Watch(storage, name, trial.number, at, self._study.tune.metric))
                for at, cell in enumerate(cells)
            ]
        return Attempt(trial.number, options, tuple(cells))

    def _distributions(self) -> "dict[str, optuna.distributions.BaseDistribution]":
        from optuna.distributions import CategoricalDistribution, FloatDistribution

        return {
            option: FloatDistribution(one.low, one.high, log=one.log)
            if isinstance(one, Space)
            else CategoricalDistribution(_texts(one))
            for option, one in self._parameters.items()
        }

    @cached_property
    def _optuna(self) -> "optuna.Study":
        """Optuna's study; other search spaces, goals or studies in the same database have studies of their own."""
        module, tuning = _import(), self._study.tune
        place = f"{self._study.name}/{self._root.name}/" if tuning.storage else ""
        aim = _number_of([tuning.metric, tuning.statistic, tuning.seeds, tuning.pruner, self._goal])
        open_in = partial(
            module.create_study,
            study_name=f"{place}{folder_of(self.values)}-{self._seed:08x}-{aim:08x}",
            direction=f"{self._goal}imize",
            load_if_exists=True,
        )
        try:
            if not self._writes:
                return self._copied(module, open_in(storage=None))
            self._root.mkdir(parents=True, exist_ok=True)
            found: optuna.Study = open_in(storage=optuna_storage(self._storage))
        except FederatedError:
            raise
        except Exception as error:  # each database has its own exceptions
            raise FederatedError(
                "Expected `tune.storage` to be the URL of a database that Optuna reaches, such as "
                f"`postgresql://user@host/name`, got {self._storage!r}: {error}"
            ) from error
        return found

    def _copied(self, module: Any, empty: "optuna.Study") -> "optuna.Study":
        """Copies trials, if there are any, from the database or journal to a study of the same name in memory."""
        if self._file is None or self._file.exists():
            with suppress(KeyError):  # raised by Optuna if there is no such study
                storage = optuna_storage(self._storage)
                empty.add_trials(module.load_study(study_name=empty.study_name, storage=storage).trials)
        return empty


def groups_of(study: Study, cells: Sequence[Cell], root: Path, writes: bool = True) -> list[Group]:
    """Returns the groups of some runs of a study; runs without anything to tune have no group.

    Each stage has its own group, which comes before the groups that start from its choice.
    """
    per, at = tuned_per(study), study.tune.at.items()
    values: dict[tuple[str, ...], dict[str, Name]] = {}
    for cell in cells:
        own = {axis: cell.axes[axis] for axis in per}
        for each in (own | study.tune.start, own) if study.tune.start else (own,):
            if parameters_of(study, each):
                values.setdefault(key_of(each, per), each)
    members: dict[tuple[str, ...], list[dict[str, Name]]] = {key: [] for key in values}
    for axes in combinations(study) if values else ():
        if at <= axes.items() and (key := key_of(axes, per)) in members:
            members[key].append(axes)
    last = dict[tuple[str, ...], Group]()
    groups = list[Group]()
    for key in sorted(values, key=lambda key: not study.tune.start.items() <= values[key].items()):
        start = last.get(key_of(values[key] | study.tune.start, per))
        known, numbers = parameters_of(study, values[key]), range(1, len(study.tune.stages) + 1)
        for stage in [number for number in numbers if _searched(study, known, number)] or [0]:
            last[key] = Group(study, values[key], members[key], root, writes, stage, last.get(key, start))
            groups.append(last[key])
    return groups


def key_of(values: Mapping[str, object], per: Iterable[str]) -> tuple[str, ...]:
    """Returns the values that all runs of a group share."""
    return tuple(str(values[axis]) for axis in per)


def _searched(study: Study, known: Parameters, stage: int) -> Parameters:
    """Returns the parameters that a stage searches; all of them without stages."""
    if not stage:
        return known
    return {option: values for option, values in known.items() if option in study.tune.stages[stage - 1]}


Train = Callable[[Sequence[Cell], Callable[[Cell, bool], object]], Outcome]
"""Trains runs, and calls a function with each finished run and whether it was ended early."""


def tune(groups: Sequence[Group], train: Train, jobs: int) -> Outcome:
    """Trains the trials of all groups, and tells their samplers the results, until no sampler has another trial."""
    failed, tell = list[Cell](), dict[str, Callable[[bool], None]]()
    while tried := [(group, attempt) for group in groups for attempt in group.fresh(jobs)]:
        # Told as soon as a run ends, so that the pruner can compare running trials with it.
        tell.update({cell.folder: partial(group.tell, one) for group, one in tried for cell in one.cells})
        outcome = train([cell for _, one in tried for cell in one.cells], lambda cell, early: tell[cell.folder](early))
        failed += outcome.failed
        for group, attempt in tried:
            group.tell(attempt)
        if outcome.signum is not None:
            return Outcome(failed, outcome.signum)
    return Outcome(failed)


def with_choices(study: Study, cells: Iterable[Cell], groups: Sequence[Group]) -> tuple[list[Cell], list[Cell]]:
    """Returns runs with their tuned options, and separately the runs for which no choice exists."""
    per = tuned_per(study)
    choices = {key_of(group.values, per): group.choice() for group in groups}
    tuned, undecided = [], []
    for cell in cells:
        key = key_of(cell.axes, per)
        choice = choices.get(key)
        if key not in choices:
            tuned.append(cell)
        elif choice is None:
            undecided.append(cell)
        else:
            tuned.append(make_cell(study, cell.axes, cell.seed, choice.options))
    return tuned, undecided


def value_of(study: Study, root: Path, attempt: Attempt) -> float:
    """Returns the mean of the deciding metric over a trial's runs, NaN if a run is not done or has diverged."""
    values = []
    for cell in attempt.cells:
        run, tune = measured_run(root, cell), study.tune
        if run is None or all(map(is_lost, run.columns.values())):
            return math.nan
        expect_known("tune.metric", [tune.metric], sorted(run.columns), f"a column of {cell.folder}")
        values.append(run_statistic(run.columns[tune.metric], tune.statistic, tune.metric, tune.goal))
    return mean_of(values)


def _params_of(trial: "optuna.trial.FrozenTrial") -> dict[str, Any]:
    return {**trial.system_attrs.get("fixed_params", {}), **trial.params}


def _texts(values: Sequence[Any]) -> list[str]:
    return [json.dumps(value) for value in values]


def _number_of(values: Any) -> int:
    """Hashes values of a study's file to a number below 2^32."""
    return int(hashlib.sha256(json.dumps(values, default=vars).encode()).hexdigest()[:8], 16)


def _import() -> Any:
    optuna = import_extra("optuna", "study", "a study that is tuned")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def tuned_together(study: Study) -> list[str]:
    """Returns the axes whose values runs of one tuning share; without those of ``start``, which others start from."""
    return [axis for axis in tuned_per(study) if axis not in study.tune.start]


def expect_sound_stages(study: Study) -> None:
    """Refuses stages that leave out a tuned option or name an unknown one, and a start without stages."""
    tune = study.tune
    tuned = {option for parameters in all_parameters(tune) for option in parameters}
    staged = [option for stage in tune.stages for option in stage]
    expect_known("tune.stages", staged, sorted(tuned), "tuned options")
    if tune.stages and (left := sorted(tuned.difference(staged))):
        raise FederatedError(f"Expected `tune.stages` to have all tuned options, got no stage with {left[0]!r}.")
    there = tune.stages or not tune.start
    expect(there, "Expected `tune.stages` with `tune.start`, where the first stage starts, got none.")
