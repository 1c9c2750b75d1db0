"""Every study that comes with the package parses, every value of its axes builds, and a run of it trains a round."""

import gc
import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lightning_fed.cli import FederatedCLI
from lightning_fed.cli.configs_command import find_config
from lightning_fed.lab.runner.command import telling_runs
from lightning_fed.lab.runner.executors import Pool
from lightning_fed.lab.runner.file import load_study
from lightning_fed.lab.studies.cells import Cell, cells_of, combinations, make_cell
from lightning_fed.lab.studies.results import StudyResults, StudyRun
from lightning_fed.lab.studies.study import Name, Study
from lightning_fed.lab.studies.table import study_table
from lightning_fed.trainer import FederatedTrainer
from tests.end_to_end.test_configs import CONFIGS, STUDIES, find_data

NAMES = [path.relative_to(CONFIGS).as_posix() for path in STUDIES]


def _profiles(name: str) -> list[Study]:
    study = load_study(str(CONFIGS / name))
    return [study, *(load_study(str(CONFIGS / name), profile) for profile in study.profiles)]


@cache
def _cells_with_new_words() -> dict[str, list[Cell]]:
    """Returns by study runs in which every value of every axis occurs, but for those whose words all occurred before.

    Words that differ in numbers alone count as one.
    """
    seen: set[str] = set()
    chosen: dict[str, list[Cell]] = {}
    for name in NAMES:
        full, *others = _profiles(name)
        cells = chosen[full.name] = []
        for study in (full, *others):
            for axes in _cover(study):
                cell = make_cell(study, axes, study.seeds[0], _first_choice(study, axes))
                words = {re.sub(r"(?<==)[-+.\de]+$", "N", word) for word in cell.words}
                if words - seen:
                    cells.append(cell)
                seen |= words
    return chosen


def _cover(study: Study) -> Iterator[dict[str, Name]]:
    every = list(combinations(study))
    left = {pair for axes in every for pair in axes.items()}
    while True:
        axes = max(every, key=lambda axes: len(left & axes.items()))
        yield axes
        left -= axes.items()
        if not left:
            return


def _first_choice(study: Study, axes: Mapping[str, str]) -> dict[str, Any]:
    """Returns what tuning may choose."""
    tune = study.tune
    more = [values[axes[axis]] for axis, values in tune.by.items() if axes[axis] in values]
    return {option: values[0] for each in (tune.parameters, *more) for option, values in each.items()}


def _data_of(cell: Cell) -> list[str]:
    """Returns the last of its configurations that names data."""
    files = [file for word, file in pairwise(cell.words) if word == "--config"]
    texts = (Path(find_config(file)).read_text() for file in reversed(files))
    return [next(text for text in texts if "\ndata:\n  class_path" in text)]


@pytest.mark.parametrize("name", NAMES)
def test_a_study_says_what_its_sizes_are(name: str) -> None:
    full, *others = _profiles(name)
    assert [len(cells_of(study)) > 0 for study in (full, *others)] == [True] * (1 + len(full.profiles))
    assert all(profile.why for profile in full.profiles.values())
    assert full.open or not full.source


@pytest.fixture(params=[name if "quickstart" in name else pytest.param(name, marks=pytest.mark.slow) for name in NAMES])
def studies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Study]]:
    """A study in all its sizes, the full one first."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.chdir(tmp_path)
    yield _profiles(request.param)
    gc.collect()  # what was built knows its trainer and is known by it; the data of all studies are 11 GB


def test_study_builds(
    studies: list[Study],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    built = 0

    @wraps(FederatedTrainer.fit)
    def fit(self: FederatedTrainer, **_: Any) -> None:
        nonlocal built
        built += 1

    monkeypatch.setattr(FederatedTrainer, "fit", fit)
    texts: list[str] = []
    cells = _cells_with_new_words()[studies[0].name]
    for cell in cells:
        if texts != _data_of(cell):
            find_data(texts := _data_of(cell), request, monkeypatch, tmp_path_factory)
        cli = FederatedCLI(list(cell.words))
        assert cli.datamodule.val_fraction > 0 or not studies[0].tune.parameters
    assert built == len(cells)


@pytest.mark.slow
def test_each_value_sets_runs_apart(studies: list[Study], tmp_path: Path) -> None:
    assert Pool(tmp_path, 1, nullcontext).mistake(list(telling_runs(cells_of(studies[0])))) == ""


def test_a_run_of_the_smallest_size_trains_a_round(
    studies: list[Study],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    study = studies[-1]
    if study.name.startswith("privacy/"):
        pytest.importorskip("dp_accounting", reason="pip install 'lightning_fed[privacy]'")
    cell = cells_of(study)[-1]  # of a method rather than its baseline
    find_data(_data_of(cell), request, monkeypatch, tmp_path_factory)
    cli = FederatedCLI([*cell.words, "--trainer.fast_dev_run=true"])
    assert cli.trainer.round == 1
    curves = {metric: {0: float(value)} for metric, value in cli.trainer.callback_metrics.items()}
    reported = replace(study, report=replace(study.report, statistic=[Name("final")]))
    run = StudyRun(cell.axes, cell.seed, "", 0, curves=curves)
    assert study_table(reported, StudyResults(study.name, "cpu", (run,))).cells
