"""A part of the campaign of configurations, within this process, and what it would notice."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_fed.cli.federated_cli import FederatedCLI
from lightning_fed.trainer import FederatedTrainer
from tests.faults.config_trials import Trial, make_trial
from tests.faults.configs import Program, judge
from tests.parts import quick_first


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    for owner, name in ((FederatedTrainer, "fit"), (FederatedCLI, "subcommands")):
        monkeypatch.setattr(owner, name, vars(owner)[name])  # so that it is put back
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")  # which some trials name
    program = Program()
    program.install()
    return program


@pytest.mark.parametrize("first", quick_first(1, range(0, 100, 10)))
@pytest.mark.slow
def test_mutated_configurations(program: Program, first: int) -> None:
    for number in range(first, first + 10):
        outcome, said = judge(program, make_trial(1, number), trains=number % 10 == 0)
        assert outcome == "right", f"trial {number}: {said}"


def test_trials_are_made_of_seed_and_number() -> None:
    assert make_trial(1, 5) == make_trial(1, 5) != make_trial(2, 5)


@pytest.mark.parametrize(
    ("files", "expected", "outcome"),
    [
        (["trainer: {max_rounds: 3}"], "refused", "wrong success"),
        (["trainer: {max_rounds: 3}", "trainer: {max_rounds: 4}"], "same", "wrong success"),
        (["trainer: {max_rounds: 3}", "trainer: {}"], "same", "right"),
        (["trainer: {max_round: 3}"], "refused", "right"),
        (["client: {class_path: tests.cli.parts.Failing}"], "any", "traceback"),
    ],
)
def test_what_a_trial_is_judged_to_be(program: Program, files: list[str], expected: str, outcome: str) -> None:
    base = "model: {class_path: tests.cli.parts.Plain}\ndata: {class_path: Digits}\n"
    trial = Trial([(base + files[0]).encode(), *(text.encode() for text in files[1:])], expected=expected)
    assert judge(program, trial, trains=False)[0] == outcome
