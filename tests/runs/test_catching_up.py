"""Pictures of the split and the W&B run, which no round waits for: when they are made, and what of them may fail."""

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import WandbLogger
from matplotlib.figure import Figure

from lightning_fed import FederatedCallback, FederatedTrainer
from tests.parts import Classifier, federated_data, federated_trainer
from tests.runs.test_loggers import Experiment


class Run(Experiment):
    """A W&B run that also tells how it ended; it draws random numbers, as opening one may."""

    def __init__(self) -> None:
        random.random()
        super().__init__()
        self.code: int | None = None

    def finish(self, exit_code: int) -> None:
        self.code = exit_code


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The W&B runs that are opened."""
    runs: list[Run] = []

    def experiment(logger: WandbLogger) -> Run:
        runs.append(Run())
        return runs[-1]

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(WandbLogger, "experiment", property(experiment))
    monkeypatch.setattr("wandb.Image", str)
    return runs


Draws = Callable[[Callable[[], None]], None]


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> Draws:
    """Has pictures drawn by a function of the test's own."""

    def set_up(draw: Callable[[], None]) -> None:
        def figures(*_: Any) -> Iterator[tuple[str, Figure]]:
            draw()
            yield "split", Figure()

        monkeypatch.setattr("lightning_fed.data.split_figures", figures)

    set_up(lambda: None)
    return set_up


class Look(FederatedCallback):
    """Notes what there is at the first local step of each round, and draws at random at the end."""

    def __init__(self, opened: list[Run], failure: BaseException | None = None) -> None:
        self.seen: list[tuple[bool, int]] = []
        self.opened, self.failure, self.drawn = opened, failure, 0.0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seen.append(((trainer.run.path / "split.png").exists(), len(self.opened)))
        if self.failure is not None:
            raise self.failure

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.drawn = random.random()


def fit(folder: Path, look: Look, rounds: int = 2, **calls: Any) -> FederatedTrainer:
    trainer = federated_trainer(folder, look, logger=None, enable_checkpointing=True, max_rounds=rounds, name="run")
    trainer.fit(Classifier(), federated_data(8), **calls)
    return trainer


def test_the_first_round_waits_for_neither_and_nothing_is_lost(tmp_path, opened, draws) -> None:
    look = Look(opened)
    trainer = fit(tmp_path, look)
    assert look.seen == [(False, 0), (True, 1)]
    (run,) = opened
    assert [row["round"] for row in run.rows if "round" in row] == [0, 1, 2]
    assert run.config["parameters"] == 18
    assert run.code == 0
    assert (trainer.run.path / "split.png").stat().st_size > 100


def test_no_random_stream_is_touched(tmp_path, opened, draws) -> None:
    """Neither by drawing nor by opening a run, after which hooks of a run of one round draw."""
    drawn = []
    for folder, draw in (("one", lambda: None), ("other", lambda: random.seed(1))):
        draws(draw)
        look = Look(opened)
        fit(tmp_path / folder, look, rounds=1)
        drawn.append(look.drawn)
    assert drawn[0] == drawn[1]


def test_a_run_that_fails_in_its_first_round_has_both(tmp_path, opened, draws) -> None:
    with pytest.raises(ValueError, match="a bad sample"):
        fit(tmp_path, Look(opened, ValueError("a bad sample")))
    assert [(run.code, [row["round"] for row in run.rows if "round" in row]) for run in opened] == [(1, [0])]
    assert len(list(tmp_path.glob("run/*/split.png"))) == 1


def test_a_run_that_is_ended_at_once_has_neither_and_gets_them_when_it_goes_on(tmp_path, opened, draws) -> None:
    fit(tmp_path, Look(opened, KeyboardInterrupt()))
    assert opened == []
    assert not list(tmp_path.glob("run/*/*.png"))
    fit(tmp_path, Look(opened), ckpt_path="last")
    assert [[row["round"] for row in run.rows if "round" in row] for run in opened] == [[0, 1, 2]]
    assert len(list(tmp_path.glob("run/*/split.png"))) == 1


def test_what_cannot_be_drawn_is_one_warning(tmp_path, opened, draws) -> None:
    draws(lambda: 1 / 0)  # type: ignore[arg-type,return-value]  # it returns nothing
    with pytest.warns(UserWarning, match=r"split could not be drawn \(ZeroDivisionError: division") as said:
        fit(tmp_path, Look(opened), rounds=3)
    assert len([one for one in said if "could not be drawn" in str(one.message)]) == 1
    assert [row["round"] for row in opened[0].rows if "round" in row] == [0, 1, 2, 3]


def test_a_run_that_is_asked_for_sooner_is_opened_then_with_all_that_waited(tmp_path, opened, draws) -> None:
    class Asks(Classifier):
        def on_train_epoch_start(self) -> None:
            self.logger.experiment.log({"mine": self.trainer.round})

    trainer = federated_trainer(tmp_path, logger=None, max_rounds=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(Asks(), federated_data(8))
    (run,) = opened
    assert [row.get("round", row.get("mine")) for row in run.rows] == [0, 1, 1, 2, 2]
    assert run.config["parameters"] == 18
