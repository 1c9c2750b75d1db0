"""``validate``, ``test`` and ``predict`` after ``fit`` without a model, as under Lightning."""

from typing import Any

import pytest
import torch

from lightning_fed.errors import FederatedError
from tests.parts import Classifier, federated_data, federated_trainer, points


class Rated(Classifier):
    """Its validation says that round 1 was the best."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", abs(self.trainer.round - 1.0))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("weight", self.net.weight.sum())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net.weight.sum().clone()


def fitted(folder: Any, **options: Any) -> Any:
    trainer = federated_trainer(folder, max_rounds=3, **options)
    trainer.fit(Rated(), federated_data(test_dataset=points(8)))
    return trainer


def weight(path: Any) -> float:
    return float(torch.load(path, weights_only=True)["state_dict"]["net.weight"].sum())


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
    assert trainer.test()[0]["weight"] == pytest.approx(trainer.lightning_module.net.weight.sum().item())


def test_without_a_fit(tmp_path) -> None:
    with pytest.raises(FederatedError, match="`--model` to be a LightningModule, got NoneType"):
        federated_trainer(tmp_path).test()
