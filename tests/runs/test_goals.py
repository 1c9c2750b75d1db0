"""Whether less or more of a metric is better: by whole words of its name, by its object, by an option, or refused."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torchmetrics import Metric

from lightning_fed.callbacks import FederatedCheckpoint
from lightning_fed.callbacks.diagnostics import ClientEvaluation
from lightning_fed.errors import FederatedError
from lightning_fed.lab.report_command import main as report
from lightning_fed.runs.folder import open_run
from lightning_fed.runs.statistics import first_as_good, goal_of, known_goal, run_statistic
from tests.parts import Classifier, federated_data, federated_trainer, points

LESS = """val/loss val_loss trainLoss val/rmse val/MeanSquaredError val/MAE test/err val/perplexity comm/bytes_up
    time/round val/dice_loss val/brier_score top5_error acc_std per_client/acc_std time_to_acc
    attack/logistic_regression/accuracy gradient/distance_client val/fpr_at_95_recall"""
MORE = """val/acc valAcc VAL_ACC test/acc/daytime test/acc/night-time test/acc/time test/acc/high_loss val/BinaryAUROC
    val/F1Score val/f1 R2Score val/r2 per_client/own/acc_worst per_client/acc_in_before acc5 recall@10 val/error_recall
    val/mAP50"""
UNKNOWN = """val/daytime val/score test/lifetime val/acceleration val/lossless val/account val/terror agreement/through
    update/norm lr val/neg_mse val/negative_loss 1-acc val/acc_drop non_error f10"""


@pytest.mark.parametrize(("names", "goal"), [(LESS, "min"), (MORE, "max"), (UNKNOWN, None)])
def test_whole_words_of_a_name_say_its_goal(names: str, goal: str | None) -> None:
    assert {name: known_goal(name) for name in names.split()} == dict.fromkeys(names.split(), goal)


def metric_classes() -> list[type[Metric]]:
    names = (
        "classification",
        "regression",
        "image",
        "text",
        "audio",
        "retrieval",
        "detection",
        "clustering",
        "nominal",
    )
    places = [torchmetrics, *(getattr(torchmetrics, name, torchmetrics) for name in names)]
    found = {kind for place in places for kind in vars(place).values() if inspect.isclass(kind)}
    return sorted((kind for kind in found if issubclass(kind, Metric)), key=lambda kind: kind.__name__)


def test_no_class_of_torchmetrics_is_taken_for_the_opposite() -> None:
    said = {kind.__name__: kind.higher_is_better for kind in metric_classes() if kind.higher_is_better is not None}
    named = {name: goal for name in said if (goal := known_goal(f"val/{name}"))}
    assert len(named) > 60
    assert {name for name, goal in named.items() if (goal == "max") != said[name]} <= {"DistanceIntersectionOverUnion"}


def test_the_best_is_the_smallest_error_and_what_nobody_knows_is_refused() -> None:
    curve = {1: 9.0, 2: 3.0, 3: 5.0}
    assert run_statistic(curve, "best", "val/rmse") == 3.0
    assert run_statistic(curve, "best", "val/daytime", "max") == 9.0
    assert (first_as_good(curve, "val/rmse", 4.0), first_as_good(curve, "x", 4.0, "max")) == (2, 1)
    assert run_statistic(curve, "final", "val/daytime") == 5.0
    with pytest.raises(FederatedError, match=r"^Expected `goal` to say whether the smallest .* of 'val/daytime' is"):
        run_statistic(curve, "best", "val/daytime")
    with pytest.raises(FederatedError, match=r"^Expected `tune.goal` to say"):
        goal_of("score", None, "tune.goal")


class Surprise(Metric):
    """The mean of what it gets; less is better."""

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, value: float) -> None:
        self.total += value

    def compute(self) -> torch.Tensor:
        return self.total


class Measured(Classifier):
    """Logs the round as ``val/surprise``, by an object or as a number."""

    def __init__(self, by_object: bool) -> None:
        super().__init__()
        self.surprise, self.by_object = Surprise(), by_object

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.surprise.update(float(self.trainer.round))
        self.log("val/surprise", self.surprise if self.by_object else float(self.trainer.round))


def fit(folder: Path, checkpoint: FederatedCheckpoint, by_object: bool = True, *callbacks: Any) -> Any:
    trainer = federated_trainer(
        folder, checkpoint, *callbacks, max_rounds=2, enable_checkpointing=True, logger=[], name="run"
    )
    trainer.fit(Measured(by_object), federated_data(8, 12, val_dataset=points(8)))
    return trainer


def test_a_metric_object_says_its_goal_to_checkpoint_clients_and_report(tmp_path: Path, capsys: Any) -> None:
    checkpoint = FederatedCheckpoint(monitor="val/surprise")
    trainer = fit(tmp_path, checkpoint, True, ClientEvaluation(every_n_rounds=1))
    assert (checkpoint.best_round, checkpoint.mode) == (0, None)
    assert "per_client/surprise_worst" in trainer.callback_metrics
    run = open_run(trainer.run.path)
    assert run is not None
    assert run.goals == dict.fromkeys(
        [f"val/surprise{end}" for end in ("", "_step", "_epoch")]
        + [f"per_client/surprise{end}" for end in ("", "_weighted", "_worst")],
        "min",
    )
    report([str(tmp_path), "--metric", "val/surprise", "--target", "0.5"])
    assert " best " in capsys.readouterr().out


def test_without_it_the_option_decides_or_the_run_is_refused(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(FederatedError, match=r"Expected `mode` of `FederatedCheckpoint` to say .*'val/surprise'"):
        fit(tmp_path / "none", FederatedCheckpoint(monitor="val/surprise"), False)
    checkpoint = FederatedCheckpoint(monitor="val/surprise", mode="max")
    with pytest.warns(UserWarning, match="`per_client/surprise_worst` is left out"):
        trainer = fit(tmp_path / "max", checkpoint, False, ClientEvaluation(every_n_rounds=1))
    assert checkpoint.best_round == 2
    assert "per_client/surprise_worst" not in trainer.callback_metrics
    words = [str(tmp_path / "max"), "--metric", "val/surprise"]
    report(words)
    shown = capsys.readouterr().out
    assert "final" in shown
    assert " best " not in shown.splitlines()[2]
    assert "say it by `--goal min` or `--goal max`" in shown
    with pytest.raises(FederatedError, match="Expected `--goal` to say"):
        report([*words, "--target", "1"])
    report([*words, "--target", "1", "--goal", "max"])
    assert "round to 1" in capsys.readouterr().out


def test_the_checkpoint_of_an_error_is_that_of_the_smallest(tmp_path: Path) -> None:
    class Errs(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/rmse", 9.0 - self.trainer.round)

    checkpoint = FederatedCheckpoint(monitor="val/rmse")
    trainer = federated_trainer(tmp_path, checkpoint, max_rounds=2, enable_checkpointing=True)
    trainer.fit(Errs(), federated_data(8, 12, val_dataset=points(8)))
    assert (checkpoint.best_round, checkpoint.best_score) == (2, 7.0)
