"""The runs of a study: one for each combination of values and each seed, and what a tuning offers and where it ends."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from lightning_fed.core import one_line
from lightning_fed.errors import FederatedError, expect_choice
from lightning_fed.lab.attack.options import AttackOptions
from lightning_fed.lab.common import column_head, expect_known
from lightning_fed.lab.studies.study import (
    AxisValue,
    Name,
    Parameters,
    Space,
    Study,
    all_parameters,
    expect_values,
    name_of,
    tuned_per,
)

__all__ = [
    "Cell", "Watch", "at_edge", "cells_of", "chosen_by", "combinations", "edges_of", "folder_of", "in_profile",
    "make_cell", "parameters_of",
]  # fmt: skip

_LONGEST = 120

_MOST_NAMES, _MOST_CLAUSES = 3, 4  # what more there is of choices and values is counted
_NEAR = 0.05  # the part of a range that counts as its end


@dataclass(frozen=True)
class Watch:
    """The Optuna trial of a run, by which the run may be ended early."""

    storage: str  # journal, or URL of the database, with Optuna's study
    study: str
    number: int
    run: int  # index of the run in the trial
    metric: str  # the column to compare


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    axes: dict[str, Name]  # a value for each axis, in the order of the file
    seed: int
    folder: str  # its folder, below the folder of the study
    options: dict[str, Any]  # options set by tuning
    words: tuple[str, ...]  # its command-line arguments, without its folder
    watch: Watch | None = None
    attack: AttackOptions | None = None  # the attack on its model

    @property
    def label(self) -> str:
        """Its name in messages."""
        values = {**self.axes, **self.options, "seed": self.seed}
        return one_line(", ".join(f"{name} {value}" for name, value in values.items()))


def in_profile(study: Study, name: str) -> Study:
    """Returns the study in a profile; ``full`` is the study itself."""
    expect_choice("--profile", name, ["full", *study.profiles])
    if name == "full":
        return study
    profile = study.profiles[name]
    expect_values(f"profiles.{name}.axes", study, profile.axes)
    expect_values(f"profiles.{name}.by", study, profile.by)
    tuned = sorted({option for parameters in all_parameters(study.tune) for option in parameters})
    expect_known(f"profiles.{name}.parameters", profile.parameters, tuned, "tuned options")

    def set_over(axis: str, value: str) -> AxisValue:
        own, other = study.axes[axis][value], profile.by.get(axis, {}).get(value, AxisValue())
        return AxisValue([*own.configs, *other.configs], {**own.set, **other.set})

    def sized(parameters: Parameters) -> Parameters:
        return {option: profile.parameters.get(option, values) for option, values in parameters.items()}

    axes = {axis: {v: set_over(axis, v) for v in profile.axes.get(axis, own)} for axis, own in study.axes.items()}
    without = [{axis: [v for v in names if v in axes[axis]] for axis, names in one.items()} for one in study.without]
    by = {axis: {v: sized(p) for v, p in own.items() if v in axes[axis]} for axis, own in study.tune.by.items()}
    stages, start = profile.stages or study.tune.stages, profile.start or study.tune.start
    tune = replace(study.tune, parameters=sized(study.tune.parameters), by=by, stages=stages, start=start)
    return replace(
        study,
        configs=[*study.configs, *profile.configs],
        set={**study.set, **profile.set},
        seeds=study.seeds if profile.seeds is None else profile.seeds,
        axes=axes,
        without=[one for one in without if all(one.values())],
        tune=tune,
    )


def combinations(study: Study) -> Iterator[dict[str, Name]]:
    """Yields the combinations of values that ``without`` does not leave out; the last axis changes fastest."""
    for values in product(*study.axes.values()):
        axes = {axis: Name(value) for axis, value in zip(study.axes, values, strict=True)}
        if not any(all(axes[axis] in names for axis, names in one.items()) for one in study.without):
            yield axes


def cells_of(study: Study) -> list[Cell]:
    """Returns the runs of a study without tuned options; the seeds of a combination follow each other."""
    cells = [make_cell(study, axes, seed, {}) for axes in combinations(study) for seed in study.seeds]
    places: dict[str, Cell] = {}
    for cell in cells:
        if (other := places.setdefault(cell.folder.casefold(), cell)) is not cell:
            raise FederatedError(
                f"Expected a folder for each run of a study, but {cell.label} and {other.label} would share one: "
                "name the values of `axes` so that they differ in more than small and capital letters."
            )
    return cells


def make_cell(study: Study, axes: dict[str, Name], seed: int, options: Mapping[str, Any]) -> Cell:
    """Makes the run of a combination and a seed, with tuned options, in a folder of its own.

    A chosen trial is also the run of its seed, so it is not trained again.
    """
    words = ["fit"]
    layers: list[Study | AxisValue] = [study, *(study.axes[axis][value] for axis, value in axes.items())]
    for layer in layers:
        words += [word for config in layer.configs for word in ("--config", config)] + _words(layer.set)
    words = [word.replace("{seed}", str(seed)) for word in [*words, *_words(options), "--seed_everything={seed}"]]
    folder = "/".join([folder_of(axes), *([folder_of(options)] if options else []), f"seed{seed}"])
    return Cell(axes, seed, folder, dict(options), tuple(words), attack=study.attack)


def _words(options: Mapping[str, Any]) -> list[str]:
    return [f"--{option}={name_of(value)}" for option, value in options.items()]


def folder_of(values: Mapping[str, Any]) -> str:
    """Returns a folder name for some values: short, and only with characters that every system allows."""
    text = ",".join(f"{axis}={value}" for axis, value in values.items()) or "run"
    plain = re.sub(r"[^\w.+,=-]", "_", text)
    if any(letter in part for pair in values.items() for part in map(str, pair) for letter in ",="):
        text = json.dumps([[axis, str(value)] for axis, value in values.items()])  # shows where a value ends
    if plain == text and len(plain) <= _LONGEST:
        return plain
    return f"{plain[:_LONGEST]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def chosen_by(cells: Sequence[Cell], only: str | None) -> list[Cell]:
    """Returns the runs that match patterns such as ``rule=FedAvg*,client rate=0.1``; ``seed`` is an axis too.

    Several patterns for one axis are alternatives.
    """
    if only is None:
        return list(cells)
    patterns: dict[str, list[str]] = {}
    for part in only.split(","):
        axis, equals, pattern = part.partition("=")
        if not equals or any(axis not in {**cell.axes, "seed": 0} for cell in cells):
            known = ", ".join([*cells[0].axes, "seed"])
            raise FederatedError(f"Expected `--only` as AXIS=PATTERN,... of axes of the study ({known}), got {part!r}.")
        patterns.setdefault(axis, []).append(pattern)

    def fits(cell: Cell) -> bool:
        values = {**cell.axes, "seed": str(cell.seed)}
        return all(any(fnmatchcase(values[axis], one) for one in several) for axis, several in patterns.items())

    if kept := [cell for cell in cells if fits(cell)]:
        return kept
    raise FederatedError(f"Expected `--only` to name runs of the study, but none of {len(cells)} fits {only!r}.")


def parameters_of(study: Study, values: Mapping[str, str]) -> Parameters:
    """Returns the parameters to tune for some values of axes."""
    parameters = dict(study.tune.parameters)
    for axis, by in study.tune.by.items():
        parameters |= by.get(values.get(axis, ""), {})
    return parameters


def edges_of(study: Study, axes: Mapping[str, str], options: Mapping[str, object]) -> dict[str, str]:
    """Returns the options whose chosen value is ``smallest`` or ``largest`` of the values that tuning offers.

    Other values than numbers have no order, and one value alone no edge. Of a range the outermost twentieth counts, on
    its own scale.
    """
    sides = {}
    for option, offered in parameters_of(study, axes).items():
        try:
            low, high = _ends(offered)
            chosen = float(name_of(options[option]))
        except (KeyError, ValueError):
            continue
        if low < high and not low < chosen < high:
            sides[option] = "smallest" if chosen <= low else "largest"
    return sides


def _ends(offered: list[object] | Space) -> tuple[float, float]:
    if not isinstance(offered, Space):
        numbers = [float(name_of(value)) for value in offered]
        return min(numbers), max(numbers)
    low, high, room = offered.low, offered.high, _NEAR * (offered.high - offered.low)
    ratio = (high / low) ** _NEAR if offered.log else 1.0
    return (low * ratio, high / ratio) if offered.log else (low + room, high - room)


def at_edge(study: Study, chosen: Iterable[tuple[Mapping[str, str], Mapping[str, object]]]) -> str:
    """Says which choices are at an edge, from the axes and the tuned options of runs; "" if none is.

    A choice is named by its values of the axes in `tune.per`; of many the values with the most choices are said.
    """
    axes, places, names = tuned_per(study), dict[str, list[str]](), set[str]()
    for values, options in chosen:
        name = column_head(axes, [values[axis] for axis in axes])
        if name not in names:
            names.add(name)
            for option, side in edges_of(study, values, options).items():
                places.setdefault(f"{option} {name_of(options[option])}, the {side}", []).append(name)
    clauses = []
    for place, where in sorted(places.items(), key=lambda one: -len(one[1])):
        several = f"{len(where)} of {len(names)} choices" if len(where) > _MOST_NAMES else "; ".join(where)
        clauses.append(f"{place} ({several})" if len(names) > 1 else place)
    more = [f"{len(clauses) - _MOST_CLAUSES} more"] if len(clauses) > _MOST_CLAUSES else []
    return "; ".join([*clauses[:_MOST_CLAUSES], *more])
