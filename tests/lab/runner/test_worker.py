"""What is checked of all runs of a study before the first is trained."""

import sys
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI

from lightning_fed.lab.runner import worker
from lightning_fed.lab.runner.file import load_study
from lightning_fed.lab.studies.cells import Cell, cells_of
from tests.lab.runner.parts import RATES


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_write_to", lambda path: None)  # it would silence pytest
    monkeypatch.setattr(sys, "stderr", sys.stderr)  # to be put back


def cells(folder: Path, former: str = "", later: str = "") -> list[Cell]:
    (folder / "t.yaml").write_text(RATES.replace(former, later))
    return cells_of(load_study(str(folder / "t.yaml"), "full"))


def test_one_parser_reads_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], LightningCLI.setup_parser
    monkeypatch.setattr(LightningCLI, "setup_parser", lambda cli, *args: made.append(cli) or make(cli, *args))
    assert worker.mistake_in(cells(tmp_path), lambda: None) == ""
    assert len(made) == 1


@pytest.mark.parametrize(
    ("former", "later", "said"),
    [
        ("values: [0.01, 0.1]", "values: [0.01, fast]", "`--model.optimizer.lr` to be of type float, got 'fast'"),
        ("GMA: {configs: [aggregator/gma]}", "GMA: {}", "Expected different values of `rule` to give different runs"),
    ],
)
def test_a_later_run_is_checked_as_the_first(tmp_path: Path, former: str, later: str, said: str) -> None:
    assert said in worker.mistake_in(cells(tmp_path, former, later), lambda: None)


@pytest.mark.slow
def test_nothing_of_a_run_is_left_for_the_next(tmp_path: Path) -> None:
    """GMA's mask would make the second FedAvg the first GMA."""
    assert worker.mistake_in([*(them := cells(tmp_path)), *reversed(them)], lambda: None) == ""
    reader = worker._Parsed(list(them[0].words))
    for cell in [*them, *reversed(them)]:
        assert reader.parse(cell.words) == worker._Parsed(list(cell.words)).parse(cell.words)
