"""The layout of 2-D convolutions where nobody asked for one: only where it is faster, and never in the way."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fed.aggregators import FedAvgM
from lightning_fed.data import FederatedDataModule
from tests.parts import CLASSES, BySizes, OneByOne, federated_trainer

LAST = torch.channels_last
SIZES = (16, 9)


def sample(row: int) -> tuple[Tensor, int]:
    return torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(row)), row % CLASSES


def images() -> FederatedDataModule:
    validation = OneByOne(4, sample)
    return FederatedDataModule(OneByOne(25, sample), BySizes(*SIZES), 2, batch_size=8, val_dataset=validation)


class Convolves(pl.LightningModule):
    """Two convolutions and a linear layer; subclasses change one thing at a time."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        first, second = nn.Conv2d(2, 4, 3, **options), nn.Conv2d(4, 3, 3)
        self.net = nn.Sequential(first, nn.ReLU(), nn.AdaptiveAvgPool2d(4), second, nn.ReLU())
        self.out = nn.Linear(12, CLASSES)

    def flat(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.out(self.flat(self.net(batch[0]))), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Views(Convolves):
    def flat(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1)


class ViewsByAnAttribute(Convolves):
    def __init__(self) -> None:
        super().__init__()
        self.flatten = lambda x: x.view(len(x), -1)

    def flat(self, x: Tensor) -> Tensor:
        return self.flatten(x)


class ViewsInValidation(Convolves):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/size", self.net(batch[0]).view(-1).norm())


class Norms(pl.Callback):
    """Takes the weights for one vector, as torch does it."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("size", nn.utils.parameters_to_vector(pl_module.parameters()).norm())


class Looks(pl.Callback):
    """Notes the layouts that the first weights have while clients train."""

    def __init__(self) -> None:
        self.last: set[bool] = set()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        ask = getattr(pl_module.net[0].weight, "is_" + "contiguous")  # in words, a module that uses it is left as it is
        self.last.add(ask(memory_format=LAST))


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    caplog.set_level("INFO", logger="lightning.pytorch")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("Memory format:")]


def test_convolutions_get_it_and_give_it_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    looks, module = Looks(), Convolves()
    trainer = federated_trainer(tmp_path, looks, logger=[], enable_checkpointing=True, name="run")
    trainer.fit(module, images())
    assert looks.last == {True}
    assert said(caplog) == ["Memory format: channels_last, as the module has 2-D convolutions."]
    asked = Convolves()
    federated_trainer(tmp_path, memory_format="channels_last").fit(asked, images())
    stored = torch.load(trainer.run.checkpoints / "last.ckpt", weights_only=True)
    assert stored["federated"]["memory_format"] == "channels_last"
    for name, value in module.state_dict().items():
        assert value.is_contiguous()
        assert stored["state_dict"][name].is_contiguous()
        assert torch.equal(value, asked.state_dict()[name])
        assert torch.equal(value, stored["state_dict"][name])
    assert asked.net[0].weight.is_contiguous(memory_format=LAST), "who asks for it keeps it"
    assert len(said(caplog)) == 1


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "view": (Views, {}, "Views.flat uses `view`"),
    "attribute": (ViewsByAnAttribute, {}, "uses `view`"),
    "validation": (ViewsInValidation, {}, "ViewsInValidation.validation_step uses `view`"),
    "callback": (Convolves, {"callback": Norms}, "Norms.on_train_epoch_end uses `parameters_to_vector`"),
    "dilated": (lambda: Convolves(dilation=2), {}, "dilated"),
    "patches": (lambda: Convolves(stride=3), {}, "do not overlap"),
    "double": (Convolves, {"precision": "64-true"}, "single precision"),
    "mixed": (Convolves, {"precision": "bf16-mixed"}, "single precision"),
    "own layout": (lambda: Convolves().to(memory_format=LAST), {}, "a layout of its own"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_would_not_suit_trains_as_it_is(tmp_path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, options, reason = REFUSED[name]
    found = []
    for layout in ("preserve", "auto"):
        module, given = make(), {key: value for key, value in options.items() if key != "callback"}
        callbacks = [options[key]() for key in options if key == "callback"]
        federated_trainer(tmp_path, *callbacks, memory_format=layout, max_rounds=2, **given).fit(module, images())
        found.append(module.state_dict())
    (line,) = said(caplog)
    assert line.startswith("Memory format: preserve, as ")
    assert reason in line
    assert all(torch.equal(value, found[1][key]) for key, value in found[0].items())


def test_nothing_is_said_of_a_module_without_convolutions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = Convolves()
    module.net = nn.Sequential(nn.Flatten(), nn.Linear(128, 12))
    federated_trainer(tmp_path).fit(module, images())
    assert said(caplog) == []


def resumed(folder: Path, rounds: int, ckpt: str | None = None, layout: str = "auto") -> Any:
    module = Convolves()
    options = {"logger": [], "enable_checkpointing": True, "name": "run", "max_rounds": rounds}
    trainer = federated_trainer(folder, FedAvgM(lr=0.5), memory_format=layout, **options)
    trainer.fit(module, images(), ckpt_path=ckpt)
    return trainer


@pytest.mark.parametrize("layout", ["channels_last", "preserve"])
def test_a_resumed_run_keeps_its_layout(tmp_path: Path, layout: str) -> None:
    whole = resumed(tmp_path / "whole", 3, layout=layout)
    last = resumed(tmp_path, 1, layout=layout).run.checkpoints / "last.ckpt"
    again = resumed(tmp_path, 3, str(last))
    for name, value in whole.lightning_module.state_dict().items():
        assert torch.equal(again.lightning_module.state_dict()[name], value)
