"""``validate``, ``test`` and ``predict`` after ``fit`` without a model, as under Lightning."""

from inspect import signature
from typing import Any
from weakref import ref

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from lightning_fed import FederatedTrainer
from lightning_fed.errors import FederatedError
from tests.parts import Classifier, federated_data, federated_trainer, points


class Rated(Classifier):
    """Its validation says that round 1 was the best."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", abs(self.trainer.round - 1.0))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("weight", self.net.weight[0].sum())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net.weight[0].sum().clone()


def fitted(folder: Any, **options: Any) -> Any:
    trainer = federated_trainer(folder, max_rounds=3, **options)
    trainer.fit(Rated(), federated_data(test_dataset=points(8)))
    return trainer


def weight(path: Any) -> float:
    return float(torch.load(path, weights_only=True)["state_dict"]["net.weight"][0].sum())


def test_the_best_model_of_the_last_fit(tmp_path) -> None:
    trainer = fitted(tmp_path, enable_checkpointing=True)
    best, last = (weight(trainer.run.checkpoints / f"{name}.ckpt") for name in ("best", "last"))
    assert best != last
    assert trainer.test(ckpt_path="last")[0]["weight"] == pytest.approx(last)
    assert trainer.test(verbose=False)[0]["weight"] == pytest.approx(best)
    assert trainer.predict(ckpt_path="best")[0].item() == pytest.approx(best)
    assert set(trainer.validate()[0]) == {"val/loss"}


def test_without_checkpoints_the_model_as_it_is(tmp_path) -> None:
    trainer = fitted(tmp_path)
    assert trainer.test()[0]["weight"] == pytest.approx(trainer.lightning_module.net.weight[0].sum().item())


def test_without_a_fit(tmp_path) -> None:
    with pytest.raises(FederatedError, match="`--model` to be a LightningModule, got NoneType"):
        federated_trainer(tmp_path).test()


@pytest.mark.parametrize("weights_only", [None, True, False])
def test_the_arguments_of_lightnings_calls(tmp_path, weights_only: bool | None) -> None:
    for call in ("fit", "validate", "test", "predict"):  # by position too
        theirs = list(signature(getattr(Trainer, call)).parameters)
        assert list(signature(getattr(FederatedTrainer, call)).parameters)[: len(theirs)] == theirs
    trainer = federated_trainer(tmp_path, enable_checkpointing=True)
    data = federated_data(test_dataset=points(8), predict_dataset=points(24))
    trainer.fit(Rated(), data, weights_only=weights_only)
    path = str(trainer.run.checkpoints / "last.ckpt")
    for call in (trainer.validate, trainer.test):
        assert call(Rated(), datamodule=data, ckpt_path=path, weights_only=weights_only, verbose=False)
    again = {"model": Rated(), "datamodule": data, "ckpt_path": path, "weights_only": weights_only}
    assert [float(each) for each in trainer.predict(**again)] == pytest.approx([weight(path)] * 3)


@pytest.mark.parametrize("interval", ["batch", "epoch", "batch_and_epoch"])
def test_predictions_that_nobody_wants_are_not_kept(tmp_path, interval: Any) -> None:
    alive, most, written = [], [], []

    class Sees(Rated):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            alive[:] = [each for each in alive if each() is not None]
            most.append(len(alive))
            output = torch.ones(3)
            alive.append(ref(output))
            return output

    class Writer(BasePredictionWriter):
        def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, *_: Any) -> None:
            written.append(prediction.sum())

        def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
            written.append(len(predictions))

    data = federated_data(predict_dataset=points(40))
    trainer = federated_trainer(tmp_path, Writer(interval))
    assert trainer.predict(Sees(), data, return_predictions=False) is None
    assert written == [3] * 5 * (interval != "epoch") + [5] * (interval != "batch")
    assert (max(most) <= 2) == (interval == "batch")
    output = tmp_path / "out.pt"
    assert trainer.predict(Sees(), data, return_predictions=False, output=str(output)) is None
    assert len(torch.load(output, weights_only=True)) == 5
    assert len(trainer.predict(Sees(), data, return_predictions=True)) == 5
