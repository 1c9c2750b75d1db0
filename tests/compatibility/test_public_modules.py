"""Modules in the manner of public repositories, from Python and by `lightning-fed fit --model`."""

import sys
from operator import attrgetter
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.lstm import LightningLSTM, SimpleLSTM
from lightning.pytorch.demos.transformer import LightningTransformer, Transformer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_fed.cli import main
from lightning_fed.errors import FederatedError
from tests.parts import CLASSES, FEATURES, Classifier, built, federated_data, federated_trainer, points

VOCABULARY = 11


def sentences(count: int) -> TensorDataset:
    words = torch.randint(VOCABULARY, (count, 7), generator=torch.Generator().manual_seed(0))
    return TensorDataset(words[:, :-1], words[:, 1:])


def fit(folder: Any, module: Any, *sizes: int, dataset: Any = None, **options: Any) -> Any:
    before = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    trainer = federated_trainer(folder, max_rounds=2, **options)
    trainer.fit(module, federated_data(*sizes, dataset=dataset))
    after = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    assert not torch.equal(before, after)
    return trainer


class Transforms(LightningTransformer):
    def __init__(self) -> None:
        super().__init__(VOCABULARY)
        self.model = Transformer(VOCABULARY, ninp=8, nhead=2, nhid=8, nlayers=1)

    def prepare_data(self) -> None:
        return None


class Recurs(LightningLSTM):
    def __init__(self) -> None:
        super().__init__(VOCABULARY)
        self.model = SimpleLSTM(VOCABULARY, ninp=6, nhid=6, nlayers=2)

    def prepare_data(self) -> None:
        return None


def test_lightnings_transformer(tmp_path):
    trainer = fit(tmp_path, built(Transforms), 8, 20, dataset=sentences(28))
    assert trainer.logged_metrics["clients/trained"] == 2


def test_lightnings_lstm_says_that_its_hidden_state_passes_on(tmp_path):
    with pytest.warns(UserWarning, match="changes `hidden` of Recurs, and the next client starts with"):
        fit(tmp_path, built(Recurs), 8, 16, dataset=sentences(24))


class Measures(Classifier):
    """Collections of metrics, outputs kept for the round's end, a plateau schedule and losses of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)))
        self.save_hyperparameters()
        parts = {"acc": MulticlassAccuracy(CLASSES), "f1": MulticlassF1Score(CLASSES)}
        self.train_metrics = MetricCollection(parts, prefix="train_")
        self.val_metrics = self.train_metrics.clone(prefix="val_")
        self.val_loss, self.outputs = MeanMetric(), []
        self.means: list[float] = []
        self.example_input_array = torch.zeros(2, FEATURES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log_dict(self.train_metrics(logits, batch[1]), on_step=False, on_epoch=True)
        self.outputs.append(loss.detach())
        return {"loss": loss, "logits": logits.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["logits"].shape == (len(batch[1]), CLASSES)
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_epoch_end(self) -> None:
        self.means.append(float(torch.stack(self.outputs).mean()))
        self.outputs.clear()
        self.train_metrics.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.val_metrics.update(logits, batch[1])
        self.val_loss.update(F.cross_entropy(logits, batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_metrics.compute(), prog_bar=True)
        self.log("val_loss", self.val_loss.compute())
        self.val_metrics.reset()
        self.val_loss.reset()

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": "val_loss"},
        }


def test_collections_of_metrics_outputs_and_plateaus(tmp_path, recwarn):
    module = built(Measures)
    trainer = fit(tmp_path, module, 16, 8)
    assert {"train_acc", "train_f1", "val_acc", "val_f1", "val_loss", "lr"} <= trainer.callback_metrics.keys()
    assert len(module.means) == 2
    assert not [warning for warning in recwarn if "the next client" in str(warning.message)]


class Contrasts(Classifier):
    """In the manner of MoCo: a queue in a buffer, a pointer, a momentum encoder, a warm-up that reads the trainer."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 4))
        self.momentum_net = nn.Linear(FEATURES, 4)
        for query, key in zip(self.net.parameters(), self.momentum_net.parameters(), strict=True):
            key.data.copy_(query.data)
            key.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(4, 16), dim=0))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for query, key in zip(self.net.parameters(), self.momentum_net.parameters(), strict=True):
                key.data = key.data * 0.99 + query.data * 0.01
            keys = F.normalize(self.momentum_net(batch[0] + 0.1), dim=1)
        queries = F.normalize(self.net(batch[0]), dim=1)
        positive = (queries * keys).sum(dim=1, keepdim=True)
        logits = torch.cat([positive, queries @ self.queue.clone().detach()], dim=1) / 0.2
        self._enqueue(keys)
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))

    @torch.no_grad()
    def _enqueue(self, keys: Tensor) -> None:
        at = int(self.at)
        stop = min(at + len(keys), self.queue.shape[1])
        self.queue[:, at:stop] = keys[: stop - at].T
        self.at[0] = stop % self.queue.shape[1]

    def validation_step(self, *_: Any) -> None:
        return None

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        steps = self.trainer.estimated_stepping_batches * self.trainer.max_epochs
        return [optimizer], [{"scheduler": CosineAnnealingLR(optimizer, steps), "interval": "step"}]


def test_momentum_encoders_and_queues(tmp_path):
    module = built(Contrasts)
    before = module.momentum_net.weight.clone(), module.queue.clone()
    fit(tmp_path, module, 8, 16)
    assert not torch.equal(module.momentum_net.weight, before[0])
    assert not torch.equal(module.queue, before[1])


FILE = """
import torch
from {package} import LightningModule
from torch import nn


class GAN(LightningModule):
    def __init__(self, width: int = 8, lr: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 64))
        self.critic = nn.Sequential(nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        real, loss = batch[0].flatten(1), nn.functional.binary_cross_entropy_with_logits
        made, ones = self.maker(torch.randn(len(real), 4)), torch.ones(len(real), 1)
        with self.toggled_optimizer(first):
            first.zero_grad()
            self.manual_backward(loss(self.critic(made), ones))
            first.step()
        with self.toggled_optimizer(second):
            second.zero_grad()
            fooled = loss(self.critic(real), ones) + loss(self.critic(made.detach()), 0 * ones)
            self.manual_backward(fooled)
            second.step()
        self.log("critic", fooled)

    def validation_step(self, batch, batch_idx):
        self.log("val/real", self.critic(batch[0].flatten(1)).mean())

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), lr=self.hparams.lr) for part in (self.maker, self.critic)]
"""


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_a_gan_by_the_command_line(tmp_path, monkeypatch, package):
    pytest.importorskip(package)
    (tmp_path / "own_gan.py").write_text(FILE.format(package=package))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_gan", raising=False)
    main([
        "fit", "--model", "own_gan.GAN", "--model.width", "6", "--data", "Digits", "--data.num_clients", "3",
        "--trainer.max_rounds", "1", "--trainer.local_steps", "2", "--trainer.logger", "[]", "--trainer.name", "gan",
        "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false",
    ])  # fmt: skip
    (path,) = tmp_path.glob("runs/gan/*/metrics.csv")
    assert "critic" in path.read_text().splitlines()[0]


class Forecasts(Classifier):
    """In the manner of gluonts: what its schedule monitors depends on whether there is a validation."""

    asks = staticmethod(lambda trainer: trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(batch)
        self.log("train_loss", loss, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        monitor = "val_loss" if self.asks(self.trainer) else "train_loss"
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer), "monitor": monitor}}


class AsksByName(Forecasts):
    asks = staticmethod(lambda trainer: trainer.enable_validation)


@pytest.mark.parametrize("module", [Forecasts, AsksByName])
def test_what_a_schedule_monitors_may_depend_on_whether_there_is_a_validation(tmp_path, module):
    for val_dataset, monitor in ((points(8), "val_loss"), (None, "train_loss")):
        trainer = federated_trainer(tmp_path, max_rounds=1)
        trainer.fit(built(module), federated_data(8, 12, val_dataset=val_dataset))
        assert [schedule.monitor for schedule in trainer.lr_scheduler_configs] == [monitor]


@pytest.mark.parametrize("name", ["fit_loop.total_batch_idx", "fit_loop.epoch_loop.batch_progress.current"])
def test_what_there_is_not_of_the_fit_loop_is_told_in_one_sentence(tmp_path, name):
    class Asks(Forecasts):
        asks = staticmethod(attrgetter(name))

    with pytest.raises(FederatedError, match=r"^Expected `trainer\.fit_loop[a-z_.]*` not .*or `local_step`\.$"):
        federated_trainer(tmp_path).fit(built(Asks), federated_data(8, 12))
    with pytest.raises(FederatedError, match=r"`trainer\.fit_loop\.max_batches` not to be used"):
        federated_trainer(tmp_path).fit_loop.max_batches = 3
