"""Lightning's own callbacks and the user's: those that work do as under Lightning, others are refused by name."""

import csv
import time
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as stock
from lightning.pytorch.callbacks import Callback, EarlyStopping, LambdaCallback, ModelSummary, RichModelSummary, Timer
from torch import Tensor, nn

from lightning_fed.aggregators import FedAvg
from lightning_fed.callbacks import FederatedCheckpoint
from lightning_fed.client_algorithms import ClientAlgorithm
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.errors import FederatedError
from tests.parts import Classifier, federated_data, federated_trainer


class Scored(Classifier):
    """Logs one score per round; where, is said by ``where``."""

    def __init__(self, scores: list[float], where: str = "validation_step") -> None:
        super().__init__()
        self.scores, self.where = scores, where

    def _log(self, where: str) -> None:
        if where == self.where:
            self.log("score", self.scores[self.trainer.round])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._log("training_step")
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._log("validation_step")

    def on_validation_epoch_end(self) -> None:
        self._log("on_validation_epoch_end")

    def on_train_epoch_end(self) -> None:
        self._log("on_train_epoch_end")


@pytest.mark.parametrize("every", [1, 2])
def test_monitors_of_what_the_trainer_counts(tmp_path, every):
    stop = EarlyStopping("comm/bytes_up", mode="min", patience=99, divergence_threshold=3 * 144)
    few = EarlyStopping(
        "clients/trained", patience=99, mode="min", stopping_threshold=1.5, check_on_train_epoch_end=True
    )
    ours = FederatedCheckpoint("comm/bytes_up", mode="min")
    best = stock.ModelCheckpoint(monitor="samples", mode="max", filename="{round}-{samples:.0f}-{epoch}")
    options = {"check_val_every_n_rounds": every, "enable_checkpointing": True, "logger": []}
    trainer = federated_trainer(tmp_path, stop, few, ours, best, max_rounds=9, **options)
    trainer.fit(Classifier(), federated_data(8, 8))
    assert trainer.totals["comm/bytes_up"] == 4 * 144  # two clients, 18 numbers of 4 bytes
    assert (trainer.round, ours.best_round, ours.best_model_score) == (4, 0, 0)
    assert best.best_model_path.endswith("round=4-samples=64-epoch=3.ckpt")
    assert trainer.callback_metrics["comm/bytes_up"] == 4 * 144
    with open(trainer.run.metrics) as file:
        rows = list(csv.DictReader(file))
    assert [row["comm/bytes_up"] for row in rows] == ["", "144", "288", "432", "576"]


@pytest.mark.parametrize("where", ["training_step", "validation_step", "on_validation_epoch_end", "on_train_epoch_end"])
def test_early_stopping_stops_at_the_right_round(tmp_path, where):
    stopping = EarlyStopping("score", patience=2, mode="max")
    trainer = federated_trainer(tmp_path, stopping, max_rounds=9)
    trainer.fit(Scored([0, 1, 2, 3, 2.5, 2.9, 9, 9, 9, 9], where), federated_data())
    assert trainer.round == trainer.current_epoch == stopping.stopped_epoch + 1 == 5
    assert stopping.best_score == 3
    assert trainer.should_stop


def test_early_stopping_counts_validations(tmp_path):
    stopping = EarlyStopping("score", patience=2, mode="min")
    trainer = federated_trainer(tmp_path, stopping, max_rounds=20, check_val_every_n_rounds=3)
    trainer.fit(Scored([0.5] * 3 + [0.1] * 18), federated_data())
    assert trainer.current_epoch == 9  # best at 3, no better at 6 and 9


def test_early_stopping_on_divergence_and_thresholds(tmp_path):
    trainer = federated_trainer(tmp_path, EarlyStopping("score", stopping_threshold=0.15), max_rounds=9)
    trainer.fit(Scored([1 / (1 + i) for i in range(10)]), federated_data())
    assert trainer.current_epoch == 6


def test_early_stopping_without_its_metric(tmp_path):
    with pytest.raises(FederatedError, match="EarlyStopping.*missing"):
        federated_trainer(tmp_path, EarlyStopping("missing")).fit(Classifier(), federated_data())


class Slow(Classifier):
    def on_train_epoch_start(self) -> None:
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("callbacks", "options"),
    [
        ([Timer(timedelta(seconds=0.05), interval="epoch")], {}),
        ([Timer(timedelta(seconds=0.05), interval="step")], {}),
        ([], {"max_time": timedelta(seconds=0.05)}),
    ],
    ids=["timer", "timer_by_step", "max_time"],
)
def test_timer_stops_between_rounds(tmp_path, callbacks, options):
    trainer = federated_trainer(tmp_path, *callbacks, max_rounds=500, **options)
    trainer.fit(Slow(), federated_data())
    assert 1 <= trainer.current_epoch <= 4


def test_max_time_as_text_and_dict(tmp_path):
    for max_time in ("00:00:00:30", {"seconds": 30}):
        trainer = federated_trainer(tmp_path, max_rounds=2, max_time=max_time)
        trainer.fit(Classifier(), federated_data())
        assert trainer.current_epoch == 2
        timer = next(cb for cb in trainer.callbacks if isinstance(cb, Timer))
        assert 25 < timer.time_remaining() < 30


def test_lambda_callback_and_summaries(tmp_path, capsys):
    seen: list[str] = []
    lambdas = LambdaCallback(
        setup=lambda trainer, module, stage: seen.append(f"setup {stage}"),
        on_train_epoch_end=lambda trainer, module: seen.append(f"round {trainer.round}"),
    )
    trainer = federated_trainer(tmp_path, lambdas, ModelSummary(), RichModelSummary(), max_rounds=2)
    trainer.fit(Classifier(), federated_data())
    assert seen == ["setup fit", "round 1", "round 2"]
    assert "Linear" in capsys.readouterr().out


MyBar = type("MyBar", (stock.TQDMProgressBar,), {})
REFUSED = [
    stock.ProgressBar(), stock.GradientAccumulationScheduler({0: 2}), stock.ThroughputMonitor(lambda batch: 1),
    stock.SpikeDetection(), stock.LearningRateFinder(), stock.StochasticWeightAveraging(0.1), stock.BatchSizeFinder(),
    MyBar(),
]  # fmt: skip


@pytest.mark.parametrize("callback", REFUSED, ids=lambda callback: type(callback).__name__)
def test_refused_by_name(tmp_path, callback):
    with pytest.raises(FederatedError, match=rf"got {type(callback).__name__}, .*callbacks`; "):
        federated_trainer(tmp_path, callback)


def test_no_callback_at_all(tmp_path):
    with pytest.raises(FederatedError, match=r"--trainer\.callbacks.*got Linear"):
        federated_trainer(tmp_path, nn.Linear(1, 1))


def test_two_aggregators_are_refused_by_name(tmp_path):
    class Other(FedAvg):
        pass

    with pytest.raises(FederatedError, match=r"one aggregator, got FedAvg and Other"):
        federated_trainer(tmp_path, FedAvg(), Other())


class Remembers(Callback):
    """A callback whose state is empty before training."""

    def __init__(self) -> None:
        self.rounds: dict[str, int] = {}

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.rounds[str(trainer.round)] = 1

    def state_dict(self) -> dict[str, int]:
        return self.rounds


@pytest.mark.parametrize(
    ("callbacks", "options", "name"),
    [
        ([EarlyStopping("score"), EarlyStopping("score", patience=9)], {}, "EarlyStopping"),
        ([Timer(timedelta(hours=1))], {"max_time": "00:01:00:00"}, "Timer.*--trainer.max_time"),
        ([Remembers(), Remembers()], {}, "Remembers.*state_key"),
    ],
    ids=["early_stopping", "timers", "empty_at_first"],
)
def test_states_that_a_checkpoint_cannot_tell_apart_are_refused(tmp_path, callbacks, options, name):
    with pytest.raises(FederatedError, match=f"each callback once, got {name}"):
        federated_trainer(tmp_path, *callbacks, **options)


def test_states_of_their_own_are_kept(tmp_path):
    class Counts(Remembers):
        state_key = "counts"

    stateless = [LambdaCallback(), LambdaCallback()]
    stopping = [EarlyStopping("score", patience=100), EarlyStopping("train/loss", patience=200)]
    callbacks = [Remembers(), Counts(), *stopping, *stateless]
    options = {"enable_checkpointing": True, "logger": [], "max_rounds": 2}
    federated_trainer(tmp_path, *callbacks, **options).fit(Scored([1.0] * 3), federated_data())
    (path,) = tmp_path.rglob("last.ckpt")
    states = torch.load(path, weights_only=True)["callbacks"]
    assert {states[cb.state_key]["patience"] for cb in stopping} == {100, 200}
    assert states["counts"] == states[callbacks[0].state_key] == {"1": 1, "2": 1}


def test_order_whatever_the_list(tmp_path):
    class Algorithm(ClientAlgorithm):
        pass

    class Own(Callback):
        pass

    given = [FederatedCheckpoint(), FedAvg(), Own(), None, [Algorithm()]]
    trainer = federated_trainer(tmp_path, *given, enable_progress_bar=True, enable_checkpointing=True)
    names = [type(cb).__name__ for cb in trainer.callbacks]
    assert names == ["Algorithm", "Own", "FederatedProgressBar", "FedAvg", "FederatedCheckpoint"]
    assert type(federated_trainer(tmp_path).aggregator) is FedAvg
    assert type(federated_trainer(tmp_path, None).aggregator) is FedAvg


def test_callbacks_of_the_module(tmp_path):
    class Brings(Scored):
        def configure_callbacks(self) -> Any:
            return [EarlyStopping("score", patience=1), FederatedCheckpoint(monitor="score", mode="max")]

    given = EarlyStopping("score", patience=100)
    trainer = federated_trainer(tmp_path, given, max_rounds=9, enable_checkpointing=True)
    trainer.fit(Brings([1.0] * 10), federated_data())
    assert trainer.current_epoch == 2
    assert given not in trainer.callbacks
    assert sum(isinstance(cb, FederatedCheckpoint) for cb in trainer.callbacks) == 1
    assert trainer.early_stopping_callback.patience == 1
    assert trainer.checkpoint_callback.monitor == "score"
    trainer.fit(Brings([1.0] * 10), federated_data())
    assert len(trainer.early_stopping_callbacks) == 1


@pytest.mark.parametrize("callback", [FedAvg(), stock.BatchSizeFinder()])
def test_callbacks_that_a_module_cannot_bring(tmp_path, callback):
    class Brings(Classifier):
        def configure_callbacks(self) -> Any:
            return callback

    with pytest.raises(FederatedError, match=type(callback).__name__):
        federated_trainer(tmp_path).fit(Brings(), federated_data())


def test_state_seen_by_federated_hooks(tmp_path):
    """A round's hooks come in the documented order, with the right model in place."""
    calls: list[str] = []

    class Watching(FederatedCallback):
        def on_round_start(self, trainer: Any, pl_module: pl.LightningModule, cohort: Any) -> None:
            calls.append(f"start {cohort.round} {[c.id for c in cohort.clients]}")
            self.start = trainer.vector.data.clone()

        def on_client_start(self, trainer: Any, pl_module: pl.LightningModule, client: Any) -> None:
            assert bool((trainer.vector.data == self.start).all())
            calls.append(f"client {client.id}")

        def on_local_step_start(self, trainer: Any, pl_module: pl.LightningModule, client: Any, step: int) -> None:
            calls.append(f"step {step}")

        def on_client_end(self, trainer: Any, pl_module: pl.LightningModule, update: Any) -> None:
            calls.append(f"end {update.num_steps}")

        def on_before_server_step(self, trainer: Any, pl_module: pl.LightningModule, update: Any) -> None:
            assert bool((trainer.weights == self.start).all())
            calls.append("before")

        def on_after_server_step(self, trainer: Any, pl_module: pl.LightningModule, update: Any) -> None:
            assert not bool((trainer.weights == self.start).all())
            assert bool((trainer.vector.data == trainer.weights).all())
            calls.append("after")

    federated_trainer(tmp_path, Watching()).fit(Classifier(), federated_data(8, 12))
    clients = ["client 0", "step 0", "end 1", "client 1", "step 0", "step 1", "end 2"]
    assert calls == ["start 1 [0, 1]", *clients, "before", "after"]
