"""Modules that cannot be trained by clients are refused in one sentence that says what to change."""

from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_fed.errors import FederatedError
from lightning_fed.sampling import ClientSampler
from tests.parts import CLASSES, FEATURES, Classifier, federated_data, federated_trainer, points


class NoOptimizerHook(pl.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[0].mean()


class NoStep(pl.LightningModule):
    def configure_optimizers(self) -> Any:
        return None


FROZEN = nn.Linear(FEATURES, CLASSES).requires_grad_(False)
MIXED = nn.Sequential(nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES).double())


def _returning(value: Any) -> type:
    class Returns(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return value(self.loss(batch))

    return Returns


def _optimizer(configure: Any) -> Any:
    return lambda: Classifier(optimizer=configure)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (NoStep, r"got NoStep: No `training_step\(\)` method defined"),
        (NoOptimizerHook, r"got NoOptimizerHook: No `configure_optimizers\(\)` method defined"),
        (lambda: Classifier(FROZEN), "Classifier to have trainable parameters"),
        (lambda: Classifier(MIXED), r"one dtype and device, got torch\.float32 on cpu, torch\.float64 on cpu"),
        (lambda: Classifier(nn.LazyLinear(CLASSES)), r"`net\.(weight|bias)` is lazy"),
        (lambda: nn.Linear(1, 1), "LightningModule, got Linear"),
        (_returning(lambda loss: 1.5), "got 'float'"),
        (_returning(lambda loss: {"log": 1}), "dict without a tensor under 'loss'"),
        (_returning(lambda loss: loss.repeat(2)), r"tensor of shape \(2,\): reduce it"),
        (_returning(lambda loss: loss.detach()), "does not depend on any trainable parameter"),
        (_returning(lambda loss: loss * float("nan")), r"client 0 diverged in round 1.*learning rate"),
        (_optimizer(lambda m: None), "torch optimizer, got NoneType"),
        (_optimizer(lambda m: []), "torch optimizer, got an empty list"),
        (_optimizer(lambda m: [SGD(m.parameters(), 1), SGD(m.parameters(), 1)]), "one optimizer, got 2"),
        (_optimizer(lambda m: [{"optimizer": SGD(m.parameters(), 1)}] * 2), "one optimizer, got 2"),
        (_optimizer(lambda m: ([SGD(m.parameters(), 1)] * 2, [])), "one optimizer, got 2"),
        (_optimizer(lambda m: SGD([nn.Parameter(torch.ones(7))], 1)), r"another tensor of shape \(7,\)"),
        (_optimizer(lambda m: SGD(m.parameters(), -0.1)), r"refuses: .*-0\.1; change `--model\.optimizer`"),
        (_optimizer(lambda m: SGD(m.parameters(), 0.1, weight_decay=None)), r"refuses: .*NoneType.*; change `--model"),
    ],
)
def test_refused_with_one_sentence(tmp_path, make, message):
    with pytest.raises(FederatedError, match=message) as error:
        federated_trainer(tmp_path).fit(make(), federated_data())
    assert "\n" not in str(error.value)
    assert str(error.value).endswith(".")


@pytest.mark.parametrize(
    ("call", "hook", "new"),
    [
        ("fit", "training_epoch_end", "on_train_epoch_end"),
        ("fit", "validation_epoch_end", "on_validation_epoch_end"),
        ("fit", "test_epoch_end", "on_test_epoch_end"),
        ("validate", "validation_epoch_end", "on_validation_epoch_end"),
        ("test", "test_epoch_end", "on_test_epoch_end"),
    ],
)
def test_hooks_of_lightning_1_are_refused_in_lightnings_words(tmp_path, call, hook, new):
    def no(self: Any, *_: Any) -> None:
        raise AssertionError("called")

    module = type("Old", (Classifier,), {hook: no, "test_step": Classifier.validation_step})()
    tests = {"check_test_every_n_rounds": 1} if (call, hook) == ("fit", "test_epoch_end") else {}
    said = f"got Old: Support for `{hook}` has been removed in v2.0.0.*You can use the `{new}` hook instead"
    with pytest.raises(FederatedError, match=said):
        getattr(federated_trainer(tmp_path, **tests), call)(module, federated_data(test_dataset=points(8)))
    if call == "fit" and not tests:
        federated_trainer(tmp_path).test(module, federated_data(test_dataset=points(8)), verbose=False)


def test_what_lightning_lets_pass_is_not_refused(tmp_path):
    class Old(Classifier):
        def test_epoch_end(self, outputs: Any) -> None:
            """Lightning asks only for what a call uses."""

        validation_epoch_end = None

        def training_step_end(self, outputs: Any) -> None:
            """Not called since Lightning 2."""

    federated_trainer(tmp_path).fit(Old(), federated_data())
    with pytest.raises(FederatedError, match=r"got Old: No `test_step\(\)` method defined"):
        federated_trainer(tmp_path).test(Old(), federated_data(test_dataset=points(8)))
    Old.predict_step = None
    with pytest.raises(FederatedError, match="`predict_step` cannot be None"):
        federated_trainer(tmp_path).predict(Old(), federated_data(predict_dataset=points(8)))


@pytest.mark.parametrize("both", [False, True])
def test_the_former_name_of_configure_model(tmp_path, both):
    class Sharded(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = None

        def configure_sharded_model(self) -> None:
            self.net = nn.Linear(FEATURES, CLASSES) if self.net is None else self.net

    if both:
        Sharded.configure_model = Classifier.configure_optimizers
        with pytest.raises(FederatedError, match="configure_sharded_model` are overridden"):
            federated_trainer(tmp_path).fit(Sharded(), federated_data())
    else:
        with pytest.warns(DeprecationWarning, match="configure_sharded_model` which is deprecated"):
            federated_trainer(tmp_path).fit(Sharded(), federated_data())


def test_parameters_unfrozen_during_training_are_refused(tmp_path):
    class Unfreezes(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net.bias.requires_grad_(False)

        def on_train_epoch_start(self) -> None:
            self.net.bias.requires_grad_(self.trainer.round == 2)

    with pytest.raises(FederatedError, match=r"`net\.bias` of Unfreezes to stay frozen"):
        federated_trainer(tmp_path, max_rounds=3).fit(Unfreezes(), federated_data())


def test_parameters_frozen_during_training_stay_put(tmp_path):
    biases: list[Tensor] = []

    class Freezes(Classifier):
        def on_train_epoch_start(self) -> None:
            self.net.bias.requires_grad_(self.trainer.round == 1)
            biases.append(self.net.bias.detach().clone())

    module = Freezes(optimizer=lambda m: SGD(m.parameters(), lr=0.1, weight_decay=0.5))
    federated_trainer(tmp_path, max_rounds=3).fit(module, federated_data(8, 12))
    assert not torch.equal(biases[0], biases[1])
    assert torch.equal(biases[1], biases[2])
    assert torch.equal(module.net.bias, biases[1])


def test_data_without_clients_is_refused(tmp_path):
    with pytest.raises(FederatedError, match="FederatedDataModule, which splits.*got LightningDataModule"):
        federated_trainer(tmp_path).fit(Classifier(), pl.LightningDataModule())
    with pytest.raises(FederatedError, match="--data"):
        federated_trainer(tmp_path).fit(Classifier())


class Draws(ClientSampler):
    """Draws what the test says."""

    def __init__(self, drawn: Any) -> None:
        self.drawn = drawn

    def sample(self, round: int, count: int, sizes: Any, seed: int) -> Any:
        return self.drawn


@pytest.mark.parametrize(
    "drawn",
    [
        np.array([0.0, 1.0]), [0.5, 1.5], [1, 1], [[0, 1]], [[0], [1]], [-1, 0], [0, 3],
        [True, False], ["0", "1"], None, 1,
    ],
    ids=str,
)  # fmt: skip
def test_cohorts_that_are_none_are_refused(tmp_path, drawn):
    trainer = federated_trainer(tmp_path, sampler=Draws(drawn), clients_per_round=2)
    message = r"`--trainer\.participation\.sampler` Draws to draw distinct client ids in \[0, 3\), got .*\.$"
    with pytest.raises(FederatedError, match=message) as error:
        trainer.fit(Classifier(), federated_data(8, 8, 8))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("drawn", [[2, 0], (0, 2), np.array([2, 0], dtype=np.uint8), torch.tensor([0, 2])], ids=str)
def test_cohorts_of_every_integer_kind_are_taken(tmp_path, drawn):
    trainer = federated_trainer(tmp_path, sampler=Draws(drawn), clients_per_round=2)
    trainer.fit(Classifier(), federated_data(8, 8, 8))
    assert trainer.logged_metrics["clients/trained"] == 2
    assert trainer.logged_metrics["samples"] == 16


def test_a_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "runs").write_text("in the way")
    trainer = federated_trainer(tmp_path / "runs", logger=[], enable_checkpointing=True)
    with pytest.raises(FederatedError, match=r"run folder in .*runs.*--trainer\.default_root_dir`\.$"):
        trainer.fit(Classifier(), federated_data())
    assert (tmp_path / "runs").read_text() == "in the way"


def test_predictions_into_a_missing_folder_are_refused_before_any_work(tmp_path):
    class Predicts(Classifier):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            raise AssertionError("the work would be lost")

    with pytest.raises(FederatedError, match=r"`--output`.*missing"):
        federated_trainer(tmp_path).predict(Predicts(), federated_data(), output=str(tmp_path / "missing" / "out.pt"))
