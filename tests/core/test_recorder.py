"""What modules log with ``self.log`` and ``log_dict``, checked by hand."""

from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torchmetrics import MaxMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.logged_values import scalar
from lightning_fed.core.recorder import MetricRecorder
from lightning_fed.errors import FederatedError
from tests.parts import CLASSES, Classifier, federated_data, federated_trainer, points


class Rows(FederatedCallback):
    """Keeps what each round logged, for loggers, for callbacks and for the bar."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.seen: list[dict[str, float]] = []
        self.bar: dict[str, float] = {}

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.rows.append({k: float(v) for k, v in trainer.logged_metrics.items()})
        self.seen.append({k: float(v) for k, v in trainer.callback_metrics.items()})
        self.bar = dict(trainer.progress_bar_metrics)


def run(folder: Any, module: pl.LightningModule, *sizes: int, **options: Any) -> Rows:
    rows = Rows()
    federated_trainer(folder, rows, **options).fit(module, federated_data(*sizes))
    return rows


class Still(Classifier):
    """Does not learn, so that what it logs can be computed from the data."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_kinds_of_values_and_options(tmp_path):
    class Logs(Still):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("tensor", torch.tensor([2.0]))
            self.log("half", torch.tensor(0.5, dtype=torch.float16))
            self.log("float", 1.5, prog_bar=True)
            self.log("int", 3)
            self.log("bool", True)
            self.log("int_tensor", torch.tensor(7))
            self.log("bool_tensor", torch.tensor(True))
            self.log("numpy", np.float32(0.25))
            self.log("numpy_int", np.int64(4))
            self.log("hidden", 9.0, logger=False)
            self.log_dict({"a": 1, "b": torch.tensor(2.0)}, prog_bar=True)
            return self.loss(batch)

    rows = run(tmp_path, Logs())
    expected = {"tensor": 2, "half": 0.5, "float": 1.5, "int": 3, "bool": 1, "int_tensor": 7, "bool_tensor": 1}
    expected |= {"numpy": 0.25, "numpy_int": 4, "a": 1, "b": 2}
    assert {key: rows.rows[0][key] for key in expected} == expected
    assert "hidden" not in rows.rows[0]
    assert rows.seen[0]["hidden"] == 9
    assert {key: rows.bar[key] for key in ("float", "a", "b")} == {"float": 1.5, "a": 1, "b": 2}
    assert "tensor" not in rows.bar


def test_means_are_weighted_by_samples_over_unequal_clients(tmp_path):
    class Logs(Still):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            self.log("x", x.mean())
            self.log("x_once", x.mean(), batch_size=1)
            self.log("batches", 1.0, reduce_fx="sum")
            self.log("largest", x.max(), reduce_fx=torch.max)
            self.log("smallest", float(x.min()), reduce_fx="min")
            return self.loss(batch)

    sizes = (20, 3, 9)
    rows = run(tmp_path, Logs(), *sizes)
    row, x = rows.rows[0], points(32).tensors[0]
    assert row["x"] == pytest.approx(x.mean().item())
    assert row["batches"] == 3 + 1 + 2
    assert row["largest"] == pytest.approx(x.max().item())
    assert row["smallest"] == pytest.approx(x.min().item())
    assert abs(row["x_once"] - row["x"]) > 1e-4  # six batches of unequal size, each with the same weight


def test_training_loss_is_logged_unless_the_module_does(tmp_path):
    class Logs(Still):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx > 0:  # the first batch has only the value that the trainer logs
                self.log("train/loss", 100.0 * batch_idx)
            return self.loss(batch)

    module = Still()
    expected = torch.nn.functional.cross_entropy(module(points(29).tensors[0]), points(29).tensors[1])
    assert run(tmp_path, module, 9, 20).rows[0]["train/loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert run(tmp_path, Logs(), 24).rows[0]["train/loss"] == pytest.approx(150.0)


class Measured(Still):
    """Logs torchmetrics objects in every way that Lightning knows."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.several = MetricCollection(
            [MulticlassAccuracy(CLASSES, average="micro"), MulticlassF1Score(CLASSES, average="micro")], prefix="train/"
        )
        self.mean_x, self.val_accuracy = MeanMetric(), MulticlassAccuracy(CLASSES, average="micro")
        self.epoch_only = MaxMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.accuracy(self(x), y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True, prog_bar=True)
        self.several(self(x), y)
        self.log_dict(self.several)
        self.mean_x.update(x)
        self.log("mean_x", self.mean_x)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.val_accuracy.update(self(x), y)
        self.epoch_only.update(x)
        self.log("val/accuracy", self.val_accuracy)

    def on_validation_epoch_end(self) -> None:
        self.log("val/largest", self.epoch_only)
        self.log("val/range", self.epoch_only.compute() + 1, prog_bar=True)


def accuracy(module: Any, data: Any) -> float:
    x, y = data.tensors
    return (module(x).argmax(1) == y).float().mean().item()


def test_torchmetrics_objects(tmp_path):
    module = Measured()
    rows = run(tmp_path, module, 20, 7, max_rounds=2)
    expected = accuracy(module, points(27))
    for row in rows.rows:  # every round starts its metrics anew
        assert row["accuracy_epoch"] == pytest.approx(expected)
        assert row["train/MulticlassAccuracy"] == row["train/MulticlassF1Score"] == pytest.approx(expected)
        assert row["mean_x"] == pytest.approx(points(27).tensors[0].mean().item())
        assert row["val/accuracy"] == pytest.approx(accuracy(module, points(12, seed=1)))
        assert row["val/largest"] == pytest.approx(points(12, seed=1).tensors[0].max().item())
        assert row["val/range"] == pytest.approx(row["val/largest"] + 1)
        assert row["accuracy_step"] in (0.0, *(pytest.approx(i / 7) for i in range(1, 8)))
    assert rows.seen[0]["accuracy"] == rows.rows[0]["accuracy_epoch"]
    assert "accuracy_epoch" in rows.bar
    assert "val/range" in rows.bar
    assert module.accuracy.update_count == 0


def test_names_with_on_step_and_on_epoch(tmp_path):
    class Logs(Still):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            for step in (None, True, False):
                for epoch in (None, True):
                    self.log(f"{step}-{epoch}", float(batch_idx), on_step=step, on_epoch=epoch, prog_bar=True)
            return self.loss(batch)

    rows = run(tmp_path, Logs(), 24)
    mean = dict.fromkeys(("None-None", "None-True", "True-None", "False-None", "False-True"), 1.0)
    forked = {"True-True_step": 2.0, "True-True_epoch": 1.0}
    assert {key: value for key, value in rows.rows[0].items() if "-" in key} == mean | forked
    assert {key: value for key, value in rows.bar.items() if "-" in key} == mean | forked
    assert {key: value for key, value in rows.seen[0].items() if "-" in key} == mean | forked | {"True-True": 1.0}


def test_hooks_and_child_modules_log(tmp_path):
    class Child(pl.LightningModule):
        def forward(self, x: Tensor) -> Tensor:
            self.log("child", x.mean())
            return x

    class Logs(Still):
        def __init__(self) -> None:
            super().__init__()
            self.child = Child()

        def on_train_start(self) -> None:
            self.log("train_start", 1.0)

        def on_train_epoch_start(self) -> None:
            self.log("at", float(self.trainer.round))

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.log("batch_start", float(len(batch[0])))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss((self.child(batch[0]), batch[1]))

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log("lr", optimizer.param_groups[0]["lr"])

        def on_validation_start(self) -> None:
            self.log("validation_start", 2.0)

        def on_train_epoch_end(self) -> None:
            self.log("round_end", 3.0)

    class Callback(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            pl_module.log("from_callback", 4.0)

    rows = Rows()
    trainer = federated_trainer(tmp_path, rows, Callback(), max_rounds=2)
    trainer.fit(Logs(), federated_data(20, 4))
    seen = {k: float(v) for k, v in trainer.callback_metrics.items()}
    assert seen["child"] == pytest.approx(points(24).tensors[0].mean().item())
    assert seen["batch_start"] == pytest.approx((8 * 8 + 8 * 8 + 4 * 4 + 4 * 4) / 24)
    expected = {"train_start": 1, "at": 2, "lr": 0, "validation_start": 2, "round_end": 3, "from_callback": 4}
    assert {key: seen[key] for key in expected} == expected


def test_own_log_method(tmp_path):
    class Prefixed(Still):
        def log(self, name: str, *args: Any, **kwargs: Any) -> None:
            super().log(f"mine/{name}", *args, **kwargs)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("x", batch[0].mean(), prog_bar=True)
            self.log_dict({"y": 2.0})
            return self.loss(batch)

    original = pl.LightningModule.log
    rows = run(tmp_path, Prefixed(), 20)
    assert rows.rows[0]["mine/x"] == pytest.approx(points(20).tensors[0].mean().item())
    assert rows.bar["mine/x"] == pytest.approx(rows.rows[0]["mine/x"])
    assert rows.rows[0]["mine/y"] == 2
    assert "mine/val/loss" in rows.rows[0]
    assert pl.LightningModule.log is original


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        (torch.zeros(2), {}, "single number, got a tensor of shape"),
        ("text", {}, "got str"),
        ({"a": 1.0}, {}, "log_dict"),
        (1.0, {"reduce_fx": "median"}, "mean, sum, min, max, got 'median'"),
        (MulticlassConfusionMatrix(CLASSES), {}, r"MulticlassConfusionMatrix.*\(3, 3\)"),
    ],
)
def test_what_cannot_be_logged(tmp_path, value, options, message):
    class Logs(Still):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if callable(value):
                value(self(batch[0]), batch[1])
            self.log("x", value, **options)
            return self.loss(batch)

    with pytest.raises(FederatedError, match=message):
        run(tmp_path, Logs())


def test_logging_where_nothing_is_collected(tmp_path):
    class Logs(Still):
        def on_fit_start(self) -> None:
            self.log("x", 1.0)

    with pytest.raises(FederatedError, match=r"self\.log.*on_train_epoch_start"):
        run(tmp_path, Logs())


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float64), ("cuda", torch.float64), ("mps", torch.float32)])
def test_integers_are_summed_in_what_the_device_has(device: str, dtype: torch.dtype) -> None:
    with FakeTensorMode():  # on a device that need not be there
        assert scalar("train/hits", torch.ones((), dtype=torch.int64, device=device)).dtype == dtype


def test_nothing_of_a_loss_is_kept_that_a_graph_may_write_to():
    recorder, memory = MetricRecorder(), torch.zeros(())
    for value in (1.0, 3.0):
        recorder.log_default("train/loss", memory.fill_(value))
    held = [value for value in vars(recorder.series["train/loss"]).values() if isinstance(value, Tensor)]
    assert held
    assert all(value.data_ptr() != memory.data_ptr() for value in held)
    recorder.read()
    assert recorder.compute().logged == {"train/loss": 2.0}
