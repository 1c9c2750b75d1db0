"""What one step of many clients asks of torch, and the classifiers' loss in it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_fed.data import FederatedDataModule
from lightning_fed.engines.vectorized.step import StackedStep
from lightning_fed.models import Classifier, ImageClassifier, LeNet, LogisticRegression, classifier
from tests.engines.package_models import PACKAGE, images
from tests.engines.parts import CLASSES, FEATURES, SIZES, both, data, train, vectors
from tests.parts import Operations


@pytest.mark.parametrize(("name", "most"), [("LogisticRegression", 23), ("LeNet", 68)])
def test_a_step_takes_few_operations(tmp_path, monkeypatch, name, most):
    """With torch's own cross-entropy and a copy for each parameter's gradients they were 36 and 88."""
    plain, counts = StackedStep.__call__, set[int]()

    def counted(*args: Any) -> Any:
        with Operations() as seen:
            result = plain(*args)
        counts.add(seen.count)
        return result

    monkeypatch.setattr(StackedStep, "__call__", counted)
    make, make_data = PACKAGE[name]
    train(tmp_path, make, "vectorized", datamodule=make_data(), max_rounds=1, precision="32-true")
    assert max(counts) <= most


@pytest.mark.parametrize("layout", ["preserve", "channels_last"])
def test_gradients_lie_in_the_layout_of_the_weights(tmp_path, layout):
    def coloured() -> ImageClassifier:
        return ImageClassifier(LeNet(CLASSES, in_channels=3, image_size=12), CLASSES)

    both(tmp_path, coloured, make_data=lambda: images(12, 3), memory_format=layout, max_rounds=1)


class Smooth(ImageClassifier):
    """Trains with a loss of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], label_smoothing=0.2)


def test_a_loss_of_a_subclass_is_its_own(tmp_path, monkeypatch):
    def make() -> Smooth:
        return Smooth(LogisticRegression(FEATURES, CLASSES), CLASSES)

    monkeypatch.setattr(classifier, "cross_entropy", None)
    both(tmp_path, make, max_rounds=1)


class Tags(Classifier):
    """Gives each of several places in a sample a class."""

    def __init__(self) -> None:
        super().__init__(nn.Conv1d(2, CLASSES, 3), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(x)


def test_scores_of_sequences(tmp_path):
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(sum(SIZES), 2, 9, generator=rng), torch.randint(CLASSES, (sum(SIZES), 7), generator=rng)
    both(tmp_path, Tags, make_data=lambda: data(TensorDataset(x, y)), max_rounds=1)


def test_labels_that_do_not_count(tmp_path):
    sizes = (8, 19, 16, 13)

    def some() -> FederatedDataModule:
        dataset = vectors(sizes)
        for first in (0, 8, 27, 43):  # two of each client: all its batches have more samples
            dataset.tensors[1][first : first + 2] = -100
        return data(dataset, sizes)

    def make() -> ImageClassifier:
        return ImageClassifier(LogisticRegression(FEATURES, CLASSES), CLASSES)

    counted = train(tmp_path, make, "vectorized", datamodule=data(sizes=sizes), max_rounds=1)
    less = both(tmp_path, make, make_data=some, max_rounds=1)
    assert not torch.equal(counted.deltas[0], less.deltas[0])


class Pair(ImageClassifier):
    """Returns its loss in a tensor of one dimension, and logs it under the name that it has by default."""

    logs = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.logs:
            self.log("train/loss", 3 * loss, batch_size=2)
        return loss.reshape(1)


@pytest.mark.parametrize("logs", [False, True])
def test_the_loss_is_logged_once(tmp_path, logs):
    def make() -> Pair:
        module = Pair(LogisticRegression(FEATURES, CLASSES), CLASSES)
        module.logs = logs
        return module

    both(tmp_path, make, max_rounds=1)
