"""Every callback class that Lightning exports works, or is refused with what to do instead."""

import inspect
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch import callbacks as stock
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR

from lightning_fed.callbacks import FederatedCheckpoint
from lightning_fed.errors import FederatedError
from lightning_fed.runs.folder import read_rows
from lightning_fed.trainer.callback_order import BARS, INSTEAD, WORKING
from tests.parts import Classifier, built, federated_data, federated_trainer, points

ARGUMENTS: dict[str, dict[str, Any]] = {
    "EarlyStopping": {"monitor": "val/loss"},
    "GradientAccumulationScheduler": {"scheduling": {0: 2}},
    "OnExceptionCheckpoint": {"dirpath": "."},
    "StochasticWeightAveraging": {"swa_lrs": 0.1},
    "ThroughputMonitor": {"batch_size_fn": len},
    "ModelPruning": {"pruning_fn": "l1_unstructured"},
    "DeviceStatsMonitor": {"cpu_stats": False},
}
BASES = {"Callback", "Checkpoint", "BaseFinetuning"}


def made(name: str) -> Any:
    return getattr(stock, name)(**ARGUMENTS.get(name, {}))


@pytest.mark.parametrize("name", sorted(set(stock.__all__) - BASES))
def test_every_callback_of_lightning(tmp_path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    names = {base.__name__ for base in getattr(stock, name).__mro__}
    assert bool(names & {*WORKING, *BARS}) != (not names & {*WORKING, *BARS} and bool(names & set(INSTEAD)))
    if inspect.isabstract(getattr(stock, name)):
        return
    if not names & {*WORKING, *BARS}:
        with pytest.raises(FederatedError, match=rf"got {name}, .*: remove it from `--trainer\.callbacks`; \w+"):
            federated_trainer(tmp_path, made(name))
        return
    trainer = federated_trainer(tmp_path, made(name), max_rounds=2, logger=[], enable_checkpointing=True)
    module = Classifier()
    module.backbone = torch.nn.Linear(1, 1)
    trainer.fit(module, federated_data(8, 12))
    assert trainer.round == 2


def rows_of(folder: Path) -> list[dict[str, str]]:
    (path,) = folder.rglob("metrics.csv")
    return list(read_rows(path))


class Rated(Classifier):
    """Gives the validations of a run these scores."""

    scores = (9.0, 3.0, 1.0, 2.0, 5.0, 4.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.scores[self.trainer.round])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/weight", self.net.weight.sum())


def saved(folder: Path, *callbacks: Any, rounds: int = 5, ckpt_path: str | None = None, **options: Any) -> Any:
    options = {"logger": [], "enable_checkpointing": True, "name": "run", **options}
    trainer = federated_trainer(folder, *callbacks, max_rounds=rounds, **options)
    trainer.fit(built(Rated), federated_data(8, 12, test_dataset=points(8)), ckpt_path=ckpt_path)
    return trainer


def test_model_checkpoint_keeps_the_best(tmp_path) -> None:
    best = stock.ModelCheckpoint(monitor="score", save_top_k=2, filename="at-{epoch}-{score:.1f}", save_last=True)
    trainer = saved(tmp_path, best)
    files = {path.name for path in trainer.run.checkpoints.iterdir()}
    assert files == {"at-epoch=1-score=1.0.ckpt", "at-epoch=2-score=2.0.ckpt", "last.ckpt", "best.ckpt"}
    assert Path(best.best_model_path).name == "at-epoch=1-score=1.0.ckpt"
    assert best.best_model_score == 1.0
    assert trainer.checkpoint_callback is best
    ours = trainer.checkpoint_callbacks[1]
    assert (ours.best_round, ours.best_model_score, Path(ours.best_model_path).name) == (2, 1.0, "best.ckpt")
    assert torch.load(best.best_model_path, weights_only=True)["epoch"] == 2


def test_model_checkpoint_every_few_rounds_in_a_folder_of_its_own(tmp_path) -> None:
    every = stock.ModelCheckpoint(dirpath=tmp_path / "own", every_n_epochs=2, save_top_k=-1, save_weights_only=True)
    saved(tmp_path, every, enable_checkpointing=False)
    assert [path.name.split("-")[0] for path in sorted((tmp_path / "own").iterdir())] == ["epoch=1", "epoch=3"]
    path = next((tmp_path / "own").iterdir())
    assert "federated" not in torch.load(path, weights_only=True)
    with pytest.raises(FederatedError, match="give it as `--weights`"):
        saved(tmp_path, ckpt_path=str(path))


@pytest.mark.parametrize("which", ["last", "best", "path"])
def test_a_run_with_a_model_checkpoint_is_resumed(tmp_path, which: str) -> None:
    def callback() -> Any:
        return stock.ModelCheckpoint(monitor="score", save_top_k=-1, filename="{epoch}")

    whole = saved(tmp_path / "whole", callback())
    first = saved(tmp_path / "parts", callback(), rounds=3)
    path = str(first.run.checkpoints / "epoch=1.ckpt") if which == "path" else which
    resumed = saved(tmp_path / "parts", callback(), ckpt_path=path)
    assert resumed.resumed
    assert torch.equal(resumed.lightning_module.net.weight, whole.lightning_module.net.weight)
    if which == "last":  # in the same folder; a run of its own begins with its own files, as under Lightning
        assert Path(resumed.checkpoint_callback.best_model_path).name == "epoch=1.ckpt"


def test_a_second_fit_begins_without_the_best_of_the_first(tmp_path) -> None:
    callback = stock.ModelCheckpoint(monitor="score", filename="{epoch}")
    trainer = saved(tmp_path, callback, rounds=3)
    first = callback.best_model_path
    trainer.max_rounds = 1
    trainer.fit(built(Rated), federated_data(8, 12))
    assert Path(callback.best_model_path).name == "epoch=0.ckpt"
    assert Path(callback.best_model_path).parent == trainer.run.checkpoints != Path(first).parent


@pytest.mark.parametrize("options", [{"every_n_train_steps": 5}, {"train_time_interval": timedelta(1)}])
def test_no_model_checkpoint_within_a_round(tmp_path, options: dict[str, Any]) -> None:
    with pytest.raises(FederatedError, match="ModelCheckpoint to save after rounds"):
        federated_trainer(tmp_path, stock.ModelCheckpoint(**options))


def test_a_monitor_that_nobody_logs(tmp_path) -> None:
    with pytest.raises(FederatedError, match="ModelCheckpoint cannot go on: .*'nothing'"):
        saved(tmp_path, stock.ModelCheckpoint(monitor="nothing"))


def test_lightning_opens_our_checkpoints(tmp_path) -> None:
    trainer = saved(tmp_path)
    path = str(trainer.run.checkpoints / "last.ckpt")
    data = federated_data(8, 12, test_dataset=points(8))
    theirs = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    (result,) = theirs.test(Rated(), data, ckpt_path=path, verbose=False)
    assert result["test/weight"] == pytest.approx(trainer.lightning_module.net.weight.sum().item())
    assert torch.equal(Rated.load_from_checkpoint(path).net.weight, trainer.lightning_module.net.weight)


def test_save_checkpoint_after_and_within_fit(tmp_path) -> None:
    class Saves(stock.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "within.ckpt")

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            with pytest.raises(FederatedError, match="while a client trains"):
                trainer.save_checkpoint(tmp_path / "client.ckpt")

    trainer = saved(tmp_path, Saves())
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    for name in ("within", "after"):
        module = Rated.load_from_checkpoint(tmp_path / f"{name}.ckpt")
        assert torch.equal(module.net.weight, trainer.lightning_module.net.weight)
    assert not (tmp_path / "client.ckpt").exists()


def test_on_exception_checkpoint(tmp_path) -> None:
    class Fails(Rated):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.round == 3:
                raise RuntimeError("stop")
            return self.loss(batch)

    callback = stock.OnExceptionCheckpoint(str(tmp_path / "failed"))
    trainer = federated_trainer(tmp_path, callback, max_rounds=5)
    module = built(Fails)
    with pytest.raises(RuntimeError, match="stop"):
        trainer.fit(module, federated_data(8, 12))
    two = saved(tmp_path / "two", rounds=2)
    kept = torch.load(callback.ckpt_path, weights_only=True)
    assert torch.equal(kept["state_dict"]["net.weight"], two.lightning_module.net.weight)
    again = federated_trainer(tmp_path, callback, max_rounds=2)
    again.fit(built(Rated), federated_data(8, 12), weights=callback.ckpt_path)
    assert not Path(callback.ckpt_path).exists()  # as under Lightning, when all has gone well


def scheduled(module: Any) -> Any:
    optimizer = SGD([{"params": [module.net.weight]}, {"params": [module.net.bias], "lr": 1.0}], lr=0.5)
    return [optimizer], [ExponentialLR(optimizer, 0.5)]


def test_the_learning_rate_is_a_column(tmp_path) -> None:
    options = {"logger": [], "max_rounds": 2, "enable_checkpointing": False}
    federated_trainer(tmp_path / "one", **options).fit(Classifier(), federated_data())
    assert [row["lr"] for row in rows_of(tmp_path / "one")] == ["", "0.1", "0.1"]
    monitor = stock.LearningRateMonitor(log_momentum=True)
    federated_trainer(tmp_path / "two", monitor, **options).fit(Classifier(optimizer=scheduled), federated_data())
    (_, first, second) = rows_of(tmp_path / "two")
    assert [float(row[name]) for row in (first, second) for name in ("lr/1", "lr/2")] == [0.5, 1.0, 0.25, 0.5]
    assert [float(row["lr-SGD/pg1"]) for row in (first, second)] == [0.5, 0.25]
    assert float(second["lr-SGD/pg2-momentum"]) == 0


def test_device_stats_are_columns(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.callbacks import device_stats_monitor

    monkeypatch.setattr(device_stats_monitor, "_PSUTIL_AVAILABLE", True)
    monkeypatch.setattr(CPUAccelerator, "get_device_stats", lambda self, device: {"used": 7.0})
    trainer = federated_trainer(tmp_path, stock.DeviceStatsMonitor(), logger=[], max_rounds=1)
    trainer.fit(Classifier(), federated_data(8, 12))
    row = rows_of(tmp_path)[-1]
    assert {row[f"DeviceStatsMonitor.on_train_batch_{at}/used"] for at in ("start", "end")} == {"7.0"}


@pytest.mark.skipif(not hasattr(stock, "WeightAveraging"), reason="Lightning 2.5 has no WeightAveraging")
def test_the_average_of_the_global_models(tmp_path) -> None:
    class Watched(Rated):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen.append(self.net.weight.detach().clone())

    plain, averaged = built(Watched), built(Watched)
    federated_trainer(tmp_path, max_rounds=3).fit(plain, federated_data(8, 12, val_dataset=points(8)))
    callback = stock.WeightAveraging()
    trainer = federated_trainer(tmp_path, callback, max_rounds=3, logger=[], enable_checkpointing=True)
    trainer.fit(averaged, federated_data(8, 12, val_dataset=points(8)))
    means = [plain.seen[0], *(torch.stack(plain.seen[1 : k + 1]).mean(0) for k in (1, 2, 3))]
    for mean, seen in zip(means, averaged.seen, strict=True):
        torch.testing.assert_close(seen, mean)
    torch.testing.assert_close(averaged.net.weight.data, means[-1])
    checkpoint = torch.load(trainer.run.checkpoints / "last.ckpt", weights_only=True)
    torch.testing.assert_close(checkpoint["state_dict"]["net.weight"], means[-1])


def test_a_prediction_writer(tmp_path) -> None:
    class Writer(stock.BasePredictionWriter):
        def __init__(self) -> None:
            super().__init__("batch_and_epoch")
            self.batches: list[int] = []

        def write_on_batch_end(self, trainer, pl_module, prediction, indices, batch, batch_idx, dataloader_idx):
            self.batches.append(batch_idx)

        def write_on_epoch_end(self, trainer, pl_module, predictions, indices):
            self.predictions = predictions

    writer = Writer()
    module = Classifier()
    module.predict_step = lambda batch, batch_idx: module(batch[0])
    trainer = federated_trainer(tmp_path, writer)
    results = trainer.predict(module, federated_data(test_dataset=points(20)))
    assert writer.batches == [0, 1, 2]
    assert all(torch.equal(a, b) for a, b in zip(writer.predictions, results, strict=True))


def test_a_bar_of_lightning_is_replaced_in_a_line(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        trainer = federated_trainer(tmp_path, stock.TQDMProgressBar(), enable_progress_bar=True)
    assert "TQDMProgressBar shows one loader's batches: rounds and clients are shown" in caplog.text
    assert [type(cb).__name__ for cb in trainer.callbacks] == ["FederatedProgressBar", "FedAvg"]


def test_our_checkpoint_beside_none_of_lightnings(tmp_path) -> None:
    ours = FederatedCheckpoint(monitor="score", mode="max")
    saved(tmp_path, ours)
    assert (ours.best_round, ours.best_model_score) == (0, 9.0)


class Holds(stock.Callback):
    """Has a state that cannot be stored as it is, and puts more into every checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        return {"score": np.float32(0.5), "where": Path("a/b"), "pair": Pair(np.int64(1), [np.bool_(True)])}

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["table"] = {"array": np.zeros(3)}
        checkpoint["parameter"] = pl_module.net.weight


class Pair(NamedTuple):
    first: Any
    second: Any


class Configured(Rated):
    def __init__(self, width: Any = None, activation: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        return [optimizer], [LambdaLR(optimizer, lambda epoch: np.float64(0.9) ** epoch)]


def test_ordinary_content_is_stored_or_left_out(tmp_path) -> None:
    callback = Holds()
    data, module = federated_data(8), Configured(width=np.int64(3), activation=torch.relu)
    trainer = federated_trainer(tmp_path, callback, logger=[], enable_checkpointing=True, name="run", max_rounds=2)
    with pytest.warns(UserWarning, match="`table` is left out for its ndarray under `table.array`") as caught:
        trainer.fit(module, data)
    said = [str(warning.message) for warning in caught if "left out" in str(warning.message)]
    assert ["`table`" in said[0], "`activation`" in said[1], len(said)] == [True, True, 2]
    checkpoint = torch.load(trainer.run.checkpoints / "last.ckpt", weights_only=True)
    state = checkpoint["callbacks"][callback.state_key]
    assert state == {"score": 0.5, "where": "a/b", "pair": (1, [True])}
    assert checkpoint["hyper_parameters"] == {"width": 3}
    assert torch.equal(checkpoint["parameter"], module.net.weight)
    assert "table" not in checkpoint
    resumed = federated_trainer(tmp_path, Holds(), logger=[], enable_checkpointing=True, name="run", max_rounds=4)
    resumed.fit(Configured(width=np.int64(3), activation=torch.relu), data, ckpt_path="last")
    assert (resumed.resumed, resumed.round) == (True, 4)


def fitted_with(folder: Path, callbacks: list[Any], rounds: int, **options: Any) -> Any:
    options = {"logger": [], "enable_checkpointing": True, "name": "run", **options}
    trainer = federated_trainer(folder, *callbacks, max_rounds=rounds, **options)
    trainer.fit(built(Rated), federated_data(8, 12), ckpt_path="last")
    return trainer


@pytest.mark.skipif(not hasattr(stock, "EMAWeightAveraging"), reason="Lightning 2.5 has no EMAWeightAveraging")
def test_a_moving_average_is_resumed(tmp_path) -> None:
    def average() -> list[Any]:
        return [stock.EMAWeightAveraging(decay=0.5)]

    whole = fitted_with(tmp_path / "whole", average(), 4)
    fitted_with(tmp_path / "parts", average(), 2)
    resumed = fitted_with(tmp_path / "parts", average(), 4)
    assert resumed.resumed
    assert torch.equal(resumed.lightning_module.net.weight, whole.lightning_module.net.weight)
    plain = fitted_with(tmp_path / "plain", [], 4)
    assert not torch.equal(plain.lightning_module.net.weight, whole.lightning_module.net.weight)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_they_go_with_every_engine(tmp_path, engine: str) -> None:
    callbacks = [stock.ModelCheckpoint(monitor="score"), stock.LearningRateMonitor(), stock.ModelSummary()]
    trainer = fitted_with(tmp_path, callbacks, 2, engine=engine)
    assert Path(callbacks[0].best_model_path).is_file()
    assert trainer.train_state.engine_choice["engine"] == engine
