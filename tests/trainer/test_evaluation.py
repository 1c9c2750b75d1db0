"""What ``validate``, ``test`` and ``predict`` return, over one and several data sets."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed.data import FederatedDataModule
from lightning_fed.errors import FederatedError
from tests.parts import CLASSES, Classifier, federated_data, federated_trainer, points


class Measured(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def _shared(self, batch: Any, name: str) -> None:
        x, y = batch
        self.accuracy(self(x), y)
        self.log(f"{name}/acc", self.accuracy)
        self.log_dict({f"{name}/loss": self.loss(batch)}, on_step=True, on_epoch=True)
        self.log(f"{name}/hidden", 1.0, logger=False)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._shared(batch, "val")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._shared(batch, "test")
        self.log(f"index{dataloader_idx}", float(dataloader_idx), add_dataloader_idx=False)

    def on_test_epoch_end(self) -> None:
        self.log("sets", 5.0)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"y": self(batch[0]).argmax(1), "index": batch_idx}


def loss_and_accuracy(module: nn.Module, data: TensorDataset) -> tuple[float, float]:
    x, y = data.tensors
    with torch.no_grad():
        out = module(x)
    return F.cross_entropy(out, y).item(), (out.argmax(1) == y).float().mean().item()


def test_validate_returns_a_list_of_dicts(tmp_path):
    module = Measured()
    trainer = federated_trainer(tmp_path)
    results = trainer.validate(module, federated_data())
    loss, acc = loss_and_accuracy(module, points(12, seed=1))
    assert [set(r) for r in results] == [{"val/acc", "val/loss_step", "val/loss_epoch"}]
    assert results[0]["val/loss_epoch"] == pytest.approx(loss, rel=1e-5)
    assert results[0]["val/acc"] == pytest.approx(acc)
    assert all(type(value) is float for value in results[0].values())
    assert trainer.callback_metrics["val/loss"].item() == pytest.approx(loss, rel=1e-5)
    assert trainer.callback_metrics["val/hidden"] == 1


def test_named_test_sets_have_suffixes(tmp_path, capsys):
    sets = {"seen": points(12, seed=2), "unseen": points(9, seed=3)}
    module = Measured()
    results = federated_trainer(tmp_path).test(module, federated_data(test_dataset=sets))
    for index, (name, data) in enumerate(sets.items()):
        loss, acc = loss_and_accuracy(module, data)
        assert results[index][f"test/loss_epoch/{name}"] == pytest.approx(loss, rel=1e-5)
        assert results[index][f"test/acc/{name}"] == pytest.approx(acc)
        assert set(results[index]) == {
            f"test/acc/{name}", f"test/loss_step/{name}", f"test/loss_epoch/{name}", f"index{index}", "sets",
        }  # fmt: skip
        assert results[index][f"index{index}"] == index
        assert results[index]["sets"] == 5
    printed = capsys.readouterr().out
    assert printed.index("seen:") < printed.index("unseen:")
    assert "test/acc/unseen" in printed


def test_names_are_those_of_lightning(tmp_path):
    """Lists of loaders, as Lightning's own datamodules return them, get Lightning's own names."""

    class Lists(pl.LightningDataModule):
        def test_dataloader(self) -> Any:
            return [DataLoader(points(9, seed=s), batch_size=4) for s in (2, 3)]

        predict_dataloader = test_dataloader

    module = Measured()
    ours = federated_trainer(tmp_path).test(module, Lists(), verbose=False)
    theirs = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    expected = theirs.test(module, Lists(), verbose=False)
    # Lightning logs values of steps for each batch and leaves them out of what it returns; and a metric object that
    # two sets share goes on from one to the next there, so that its value for the second set is one of both.
    ours = [{key: value for key, value in result.items() if "test/loss_step" not in key} for result in ours]
    assert [set(result) for result in ours] == [set(result) for result in expected]
    shared = "test/acc/dataloader_idx_1"
    assert ours[1].pop(shared) == pytest.approx(loss_and_accuracy(module, points(9, seed=3))[1])
    assert expected[1].pop(shared) is not None
    assert ours == [pytest.approx(result, rel=1e-6) for result in expected]
    predictions = federated_trainer(tmp_path).predict(module, Lists())
    assert [len(batches) for batches in predictions] == [3, 3]


def test_a_single_named_set_is_logged_under_its_name(tmp_path):
    module = Measured()
    named, unnamed = (
        federated_trainer(tmp_path).test(module, federated_data(test_dataset=dataset))[0]
        for dataset in ({"unseen": points(4)}, points(4))
    )
    assert named["test/acc/unseen"] == unnamed["test/acc"]
    assert "test/acc" not in named


def test_several_sets_during_fit(tmp_path):
    sets = {"seen": points(12, seed=2), "unseen": points(9, seed=3)}
    trainer = federated_trainer(tmp_path, check_test_every_n_rounds=1)
    module = Measured()
    trainer.fit(module, federated_data(test_dataset=sets))
    _, acc = loss_and_accuracy(module, sets["unseen"])
    assert trainer.callback_metrics["test/acc/unseen"].item() == pytest.approx(acc)


def test_test_sets_are_built_once_in_a_fit(tmp_path):
    built: list[Any] = []

    class Counted(FederatedDataModule):
        def test_dataloader(self) -> Any:
            built.append(super().test_dataloader())
            return built[-1]

    data = Counted(points(20), num_clients=2, batch_size=8, test_dataset=points(9, seed=2))
    trainer = federated_trainer(tmp_path, check_test_every_n_rounds=1, max_rounds=3)
    trainer.fit(Measured(), data)
    assert len(built) == 1
    assert "test/acc" in trainer.callback_metrics
    federated_trainer(tmp_path).fit(Measured(), data)
    assert len(built) == 1, "a run that does not look at them builds none"


def test_predict_returns_what_the_step_returns(tmp_path):
    module, data = Measured(), points(20, seed=4)
    outputs = federated_trainer(tmp_path).predict(module, federated_data(predict_dataset=data))
    assert [output["index"] for output in outputs] == [0, 1, 2]
    assert torch.equal(torch.cat([output["y"] for output in outputs]), module(data.tensors[0]).argmax(1))
    assert not any(output["y"].requires_grad for output in outputs)


def test_predict_without_predict_step(tmp_path):
    class OnlyForward(pl.LightningModule):
        def forward(self, batch: Any) -> Tensor:
            return batch[0].sum(1)

    data = points(20, seed=4)
    outputs = federated_trainer(tmp_path).predict(OnlyForward(), federated_data(predict_dataset=data))
    assert torch.equal(torch.cat(outputs), data.tensors[0].sum(1))


def test_metrics_of_an_earlier_call_are_gone(tmp_path):
    trainer, module = federated_trainer(tmp_path), Measured()
    trainer.fit(module, federated_data())
    assert "train/loss" in trainer.callback_metrics
    trainer.validate(module, federated_data(), verbose=False)
    assert set(trainer.callback_metrics) == {"val/acc", "val/hidden", "val/loss", "val/loss_step", "val/loss_epoch"}


def test_limits(tmp_path, capsys):
    seen: list[str] = []

    class Counted(Measured):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append("val")

        def test_step(self, batch: Any, batch_idx: int) -> None:
            seen.append("test")

        def predict_step(self, batch: Any, batch_idx: int) -> None:
            seen.append("predict")

        def on_validation_start(self) -> None:
            seen.append("start")

    data = federated_data(val_dataset=points(40), test_dataset=points(40), predict_dataset=points(40))
    options = {"limit_val_batches": 0.4, "limit_test_batches": 3, "limit_predict_batches": 1}
    trainer = federated_trainer(tmp_path, **options)
    trainer.validate(Counted(), data, verbose=False)
    trainer.test(Counted(), data, verbose=False)
    assert len(trainer.predict(Counted(), data)) == 1
    assert seen == ["start", "val", "val", "test", "test", "test", "predict"]
    seen.clear()
    federated_trainer(tmp_path, limit_val_batches=0).fit(Counted(), data)
    assert federated_trainer(tmp_path, limit_val_batches=0.0).validate(Counted(), data, verbose=False) == []
    assert seen == []
    capsys.readouterr()
    for limit in (0, 0.0):
        for sets in (points(8), {"seen": points(8), "unseen": points(9)}):
            trainer = federated_trainer(tmp_path, limit_test_batches=limit)
            assert trainer.test(Counted(), federated_data(test_dataset=sets)) == []
    assert capsys.readouterr().out == ""
    assert seen == []
    with pytest.raises(FederatedError, match="limit_val_batches"):
        federated_trainer(tmp_path, limit_val_batches=0.1).validate(Counted(), data)


class Modes(Classifier):
    """Keeps its first layer in eval mode, and notes the modes in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.dropout = nn.BatchNorm1d(2).eval(), nn.Dropout()
        self.modes: list[tuple[str, bool, bool, bool]] = []

    def _note(self, step: str) -> None:
        self.modes.append((step, self.frozen.training, self.dropout.training, torch.is_grad_enabled()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._note("train")
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._note("val")


def test_modes_are_kept(tmp_path):
    module = Modes()
    federated_trainer(tmp_path).fit(module, federated_data(8, val_dataset=points(8)))
    val = ("val", False, False, False)
    assert module.modes == [val, ("train", False, True, True), val]
    assert not module.frozen.training
    assert module.dropout.training


def test_own_evaluation_mode(tmp_path):
    class DropsInValidation(Modes):
        def on_validation_model_eval(self) -> None:
            super().on_validation_model_eval()
            self.dropout.train()

        def on_validation_model_train(self) -> None:
            super().on_validation_model_train()
            self.frozen.train()

    module = DropsInValidation()
    federated_trainer(tmp_path).fit(module, federated_data(8, val_dataset=points(8)))
    assert module.modes[0] == ("val", False, True, False)
    assert module.modes[1] == ("train", True, True, True)


def test_step_arguments(tmp_path):
    class Positional(Classifier):
        def validation_step(self, data: Any, number: int) -> None:
            self.log("number", float(number), reduce_fx="max")

        def test_step(self, batch: Any) -> None:
            self.log("x", batch[0].mean())

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> int:
            return dataloader_idx

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("last", float(batch_idx), reduce_fx="max")

    data = federated_data(test_dataset=points(12))
    trainer = federated_trainer(tmp_path)
    assert trainer.validate(Positional(), data, verbose=False) == [{"number": 1.0, "last": 1.0}]
    expected = points(12).tensors[0].mean().item()
    assert trainer.test(Positional(), data, verbose=False) == [{"x": pytest.approx(expected)}]
    assert trainer.predict(Positional(), data) == [0, 0]


def test_steps_may_change_their_batch(tmp_path):
    class InPlace(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            batch[0].mul_(2)
            self.log("x", batch[0].mean())

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            batch[0].mul_(2)
            self.log("train/x", batch[0].mean())
            return self.loss(batch)

    data, trainer = federated_data(), federated_trainer(tmp_path, max_rounds=3)
    trainer.fit(InPlace(), data)
    assert trainer.callback_metrics["x"].item() == pytest.approx(2 * points(12, seed=1).tensors[0].mean().item())
    assert trainer.callback_metrics["train/x"].item() == pytest.approx(2 * points(20).tensors[0].mean().item())


def test_no_data_and_no_step(tmp_path):
    data = FederatedDataModule(points(8), num_clients=1)
    with pytest.raises(FederatedError, match="val_dataloader"):
        federated_trainer(tmp_path).validate(Measured(), data)
    data = federated_data(test_dataset=points(4))
    for call in (federated_trainer(tmp_path).test, federated_trainer(tmp_path, check_test_every_n_rounds=1).fit):
        with pytest.raises(FederatedError, match=r"Classifier.*test_step"):
            call(Classifier(), data)


class Stream(IterableDataset):
    """Samples that come one after the other: nobody knows how many."""

    def __iter__(self) -> Any:
        return iter(zip(*points(12, seed=1).tensors, strict=True))


def test_a_loader_without_a_length_is_read_to_its_end(tmp_path):
    module, streaming = Measured(), federated_data()
    streaming.val_dataloader = lambda: DataLoader(Stream(), batch_size=5)
    (found,) = federated_trainer(tmp_path).validate(module, streaming)
    loss, acc = loss_and_accuracy(module, points(12, seed=1))
    assert found["val/loss_epoch"] == pytest.approx(loss, rel=1e-5)
    assert found["val/acc"] == pytest.approx(acc)
