"""The runs of a study: one for each combination of values and each seed, as words of a command line."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from lightning_fed.errors import FederatedError
from lightning_fed.lab.attack.options import AttackOptions
from lightning_fed.lab.common import one_line
from lightning_fed.lab.studies.study import AxisValue, Name, Study, name_of

__all__ = ["Cell", "Watch", "cells_of", "chosen_by", "combinations", "folder_of", "make_cell"]

_LONGEST = 120


@dataclass(frozen=True)
class Watch:
    """The trial of Optuna by which a run may be ended early."""

    storage: str  # the journal or the URL of the database that Optuna's study is in
    study: str
    number: int
    run: int  # which of the trial's runs it is
    metric: str  # column that is compared


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    axes: dict[str, Name]  # a value for each axis, in the order of the file
    seed: int
    folder: str  # where its run folders lie, below that of the study
    options: dict[str, Any]  # those that tuning sets
    words: tuple[str, ...]  # its command line, but for where it is kept
    watch: Watch | None = None
    attack: AttackOptions | None = None  # what is made on its model

    @property
    def label(self) -> str:
        """What it is called in messages."""
        values = {**self.axes, **self.options, "seed": self.seed}
        return one_line(", ".join(f"{name} {value}" for name, value in values.items()))


def combinations(study: Study) -> Iterator[dict[str, Name]]:
    """Yields the combinations of values that are not left out, the last axis fastest."""
    for values in product(*study.axes.values()):
        axes = {axis: Name(value) for axis, value in zip(study.axes, values, strict=True)}
        if not any(all(axes[axis] in names for axis, names in one.items()) for one in study.without):
            yield axes


def cells_of(study: Study) -> list[Cell]:
    """Returns the runs of a study without what is tuned, all seeds of a combination one after the other."""
    cells = [make_cell(study, axes, seed, {}) for axes in combinations(study) for seed in study.seeds]
    places: dict[str, Cell] = {}
    for cell in cells:
        if (other := places.setdefault(cell.folder.casefold(), cell)) is not cell:
            raise FederatedError(
                f"Expected each run of a study to have a folder of its own, but that of {cell.label} is that of "
                f"{other.label}: name the values of `axes` by more than small and capital letters."
            )
    return cells


def make_cell(study: Study, axes: dict[str, Name], seed: int, options: Mapping[str, Any]) -> Cell:
    """Makes the run of a combination and a seed, with options that tuning sets, in a folder of its own.

    A trial that is chosen is the run of its seed, which need not be trained again.
    """
    words = ["fit"]
    layers: list[Study | AxisValue] = [study, *(study.axes[axis][value] for axis, value in axes.items())]
    for layer in layers:
        words += [word for config in layer.configs for word in ("--config", config)] + _words(layer.set)
    words += [*_words(options), f"--seed_everything={seed}"]
    folder = "/".join([folder_of(axes), *([folder_of(options)] if options else []), f"seed{seed}"])
    return Cell(axes, seed, folder, dict(options), tuple(words), attack=study.attack)


def _words(options: Mapping[str, Any]) -> list[str]:
    return [f"--{option}={name_of(value)}" for option, value in options.items()]


def folder_of(values: Mapping[str, Any]) -> str:
    """Returns the name of a folder for some values, short and of letters that every system takes."""
    text = ",".join(f"{axis}={value}" for axis, value in values.items()) or "run"
    plain = re.sub(r"[^\w.+,=-]", "_", text)
    if any(letter in part for pair in values.items() for part in map(str, pair) for letter in ",="):
        text = json.dumps([[axis, str(value)] for axis, value in values.items()])  # which says where a value ends
    if plain == text and len(plain) <= _LONGEST:
        return plain
    return f"{plain[:_LONGEST]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def chosen_by(cells: Sequence[Cell], only: str | None) -> list[Cell]:
    """Returns the runs whose values fit patterns such as ``rule=FedAvg*,client rate=0.1``; ``seed`` counts as an axis.

    Several patterns for an axis are alternatives.
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
