"""Batches of all lanes at once are, to the bit, those that each client meets when it trains alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.train_state import LocalOptions
from lightning_fed.core.updates import Client
from lightning_fed.data import (
    Augmentation,
    BinaryColors,
    ClassColors,
    ClientColors,
    ClientRotation,
    CropFlip,
    FederatedDataModule,
    SampleAugmentation,
)
from lightning_fed.engines.vectorized.batches import LaneBatches
from tests.engines.parts import Model, train
from tests.parts import BySizes, OneByOne, same

# Batches of 4: from one to four in an epoch, whose last ones have 1, 2, 3 or 4 samples; one client has none.
SIZES = (9, 13, 0, 4, 6, 16, 3)
CLASSES = 3


def images() -> TensorDataset:
    stream = torch.Generator().manual_seed(0)
    x = torch.rand(sum(SIZES), 1, 6, 5, generator=stream)
    return TensorDataset(x, torch.randint(CLASSES, (sum(SIZES),), generator=stream))


class Brightness(SampleAugmentation):
    """Draws a number of another kind than the rows."""

    def draw(self, size: int, generator: torch.Generator) -> Tensor:
        return torch.rand(size, 2, 1, generator=generator)

    def change(self, inputs: Tensor, draws: Tensor) -> Tensor:
        return inputs * draws[:, 0, :, None, None] + draws[:, 1, :, None, None]


class Noise(Augmentation):
    """Knows batches of one client alone."""

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        return inputs + inputs.mean() * torch.rand(inputs.shape, generator=generator)


class Twice(CropFlip):
    """Changes what its base does in a way of its own."""

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        return super().__call__(super().__call__(inputs, generator), generator)


class Notes(Model):
    """Notes the batches that each client meets, which trains alone."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(30, CLASSES))
        self.met: dict[int, list[Any]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        client: Any = self.trainer.client  # type: ignore[attr-defined]  # of our trainer
        self.met.setdefault(client.id, []).append([part.clone() for part in batch])
        return F.cross_entropy(self.net(batch[0].flatten(1)[:, :30]), batch[1])


class Scales(Notes):
    """Has a hook of its own, which looks at the whole batch."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] / batch[0].max(), batch[1]]


def met(batches: LaneBatches) -> dict[int, list[Any]]:
    """Returns the batches that each client meets in its lane."""
    found: dict[int, list[Any]] = {client.id: [] for client in sorted(batches.clients, key=lambda client: client.id)}
    for step in range(batches.steps[0]):
        for run in batches.groups(step):
            for place, client in enumerate(batches.clients[run.lanes]):
                found[client.id].append([part[place] for part in run.batch])
    return found


class AtOnce(FederatedCallback):
    """Takes the batches that the clients of a round meet as lanes, before they train.

    Attributes:
        met: Those of each client.
        gathers: Whether they were taken from tensors at once.
    """

    def __init__(self) -> None:
        self.met: dict[int, list[Any]] = {}
        self.gathers = False

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        clients = tuple(Client(id, int(size), 1) for id, size in enumerate(trainer.source.sizes) if size)
        batches = LaneBatches(trainer.train_state, trainer.options, clients, by_index=False)
        self.gathers, self.met = batches.gathers, met(batches)


# Options of the data, those of the trainer, the module, and whether samples of all lanes are taken at once.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], type[Notes], bool]] = {
    "plain": ({}, {}, Notes, True),
    "crops": ({"augmentation": CropFlip(2)}, {}, Notes, True),
    "another's numbers": ({"augmentation": Brightness()}, {}, Notes, True),
    "whole batches": ({"augmentation": Noise()}, {}, Notes, False),
    "another call": ({"augmentation": Twice(1)}, {}, Notes, False),
    "read one by one": (
        {"augmentation": CropFlip(2), "train_dataset": OneByOne(sum(SIZES), images().__getitem__)}, {}, Notes, False,
    ),
    "rotations": ({"skew": ClientRotation()}, {}, Notes, True),
    "colours": ({"skew": ClientColors()}, {}, Notes, True),
    "binary": ({"skew": BinaryColors(label_noise=0.3)}, {}, Notes, True),
    "class colours": ({"skew": ClassColors()}, {}, Notes, True),
    "crops of colours": ({"skew": ClientColors(), "augmentation": CropFlip(1)}, {}, Notes, True),
    "bf16": ({}, {"precision": "bf16-true"}, Notes, True),
    "double crops": ({"augmentation": CropFlip(2)}, {"precision": "64-true"}, Notes, True),
    "mixed": ({}, {"precision": "bf16-mixed"}, Notes, True),
    "a hook": ({}, {"precision": "64-true"}, Scales, False),
    "short batches left out": ({"augmentation": CropFlip(2), "drop_last": True}, {}, Notes, True),
}  # fmt: skip
WORK: dict[str, dict[str, Any]] = {
    "epochs": {"local_epochs": 3},
    "steps": {"local_steps": 5},
    "windows": {"local_epochs": 2, "accumulate_grad_batches": 2},
}


def data(**options: Any) -> FederatedDataModule:
    given = {"train_dataset": images(), "partitioner": BySizes(*SIZES), "num_clients": len(SIZES), "batch_size": 4}
    return FederatedDataModule(**{**given, **options})


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("way", WAYS)
def test_a_client_meets_the_same_batches_as_alone(tmp_path: Path, way: str, work: str) -> None:
    given, options, make, gathers = WAYS[way]
    module, once = make(), AtOnce()
    options = {"precision": "32-true", "max_rounds": 1, **options, **WORK[work]}
    train(tmp_path, lambda: module, "sequential", once, datamodule=data(**given), **options)
    assert once.gathers == gathers
    assert len(once.met) == 5 + (way != "short batches left out")
    assert same(once.met, dict(sorted(module.met.items())))


@pytest.mark.parametrize("way", ["crops", "rotations", "crops of colours"])
def test_a_pass_over_all_data_meets_them_as_they_are(way: str) -> None:
    module = data(**WAYS[way][0])
    held = module.split.keep(np.arange(sum(SIZES)) % 3 > 0)
    with module.training_on(held):
        source: Any = module.train_source()
    plain = getattr(source, "unaugmented", source)
    state: Any = SimpleNamespace(seed=4, source=source, transfer=None)
    clients = tuple(Client(id, int(size), 1) for id, size in enumerate(source.sizes) if size)
    batches = LaneBatches(state, LocalOptions(), clients, by_index=False, whole=5)
    assert batches.gathers
    assert same(met(batches), {c.id: list(plain.batches(c.id, torch.arange(c.num_samples), 0, 5)) for c in clients})
