"""Metric objects hold what they counted until the hooks at the end of an epoch have run, and start anew after them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import Metric, SpearmanCorrCoef
from torchmetrics.classification import MulticlassAccuracy

from tests.parts import CLASSES, Classifier, federated_data, federated_trainer, points

SETS = {"seen": points(12, seed=2), "unseen": points(9, seed=3)}


def new_accuracy() -> MulticlassAccuracy:
    return MulticlassAccuracy(CLASSES, average="micro")


def accuracy(module: nn.Module, data: TensorDataset) -> float:
    x, y = data.tensors
    return (module(x).argmax(1) == y).float().mean().item()


class Still(Classifier):
    """Does not learn, and keeps what its hooks read from its metric objects."""

    def __init__(self) -> None:
        super().__init__(optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.0))
        self.read: dict[str, list[float]] = {"train": [], "val": [], "test": []}


def test_hooks_at_the_end_of_a_round_read_the_values_that_are_logged(tmp_path):
    class Reads(Still):
        def __init__(self) -> None:
            super().__init__()
            self.train_acc, self.val_acc = new_accuracy(), new_accuracy()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.train_acc(self(batch[0]), batch[1])
            self.log("train/acc", self.train_acc)
            return self.loss(batch)

        def on_train_epoch_end(self) -> None:
            self.read["train"].append(self.train_acc.compute().item())

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.val_acc.update(self(batch[0]), batch[1])
            self.log("val/acc", self.val_acc)

        def on_validation_epoch_end(self) -> None:
            self.read["val"].append(self.val_acc.compute().item())

    torch.manual_seed(1)
    module, trainer = Reads(), federated_trainer(tmp_path, max_rounds=2)
    trainer.fit(module, federated_data(20, 7))
    train, val = accuracy(module, points(27)), accuracy(module, points(12, seed=1))
    assert train > 0
    assert val > 0
    assert module.read["train"] == [pytest.approx(train)] * 2
    assert module.read["val"] == [pytest.approx(val)] * 3
    assert trainer.callback_metrics["train/acc"].item() == pytest.approx(train)
    assert trainer.callback_metrics["val/acc"].item() == pytest.approx(val)
    assert module.train_acc.update_count == module.val_acc.update_count == 0


class OnSets(Still):
    """Logs one metric object for all test sets and one for each."""

    def __init__(self, own: list[Metric]) -> None:
        super().__init__()
        self.shared, self.own = new_accuracy(), nn.ModuleList(own)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        scores, y = self(batch[0]), batch[1]
        self.shared(scores, y)
        self.log("shared", self.shared)
        own = self.own[dataloader_idx]
        own.update(*((scores[:, 0], y.float()) if isinstance(own, SpearmanCorrCoef) else (scores, y)))
        self.log("own", own)

    def on_test_epoch_end(self) -> None:
        self.read["test"] = [metric.compute().item() for metric in (self.shared, *self.own)]
        self.in_lists = [sum(map(len, metric.preds)) for metric in self.own if isinstance(metric, SpearmanCorrCoef)]


# The last two keep their state in lists, and in metrics inside.
@pytest.mark.parametrize("make", [new_accuracy, SpearmanCorrCoef, lambda: 2 * new_accuracy()])
def test_every_set_counts_for_itself_and_keeps_its_own_metric(tmp_path, make):
    torch.manual_seed(1)
    module, trainer = OnSets([make() for _ in SETS]), federated_trainer(tmp_path)
    for _ in range(2):  # the second time, nothing is left of the first
        results = trainer.test(module, federated_data(test_dataset=SETS), verbose=False)
        shared = [results[index][f"shared/{name}"] for index, name in enumerate(SETS)]
        assert shared == pytest.approx([accuracy(module, data) for data in SETS.values()])
        assert shared[0] != shared[1]
        own = [results[index][f"own/{name}"] for index, name in enumerate(SETS)]
        assert own[0] != own[1]
        assert module.read["test"] == pytest.approx([shared[1], *own])
        assert module.in_lists == ([12, 9] if make is SpearmanCorrCoef else [])
        parts = [m for m in module.modules() if isinstance(m, Metric) and m.metric_state]
        assert [m.update_count for m in parts] == [0] * 3
