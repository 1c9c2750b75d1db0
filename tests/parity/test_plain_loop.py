"""Federated averaging by the trainer against a plain loop that shares only seeds and split with it, bit for bit."""

import gzip
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from lightning_fed import FederatedTrainer
from lightning_fed.aggregators import FedAvg
from lightning_fed.core.seeding import Purpose, generator_for, numpy_generator_for, seed_everywhere, seed_for
from lightning_fed.data import FashionMNIST, FederatedDataModule, Partitioner, Shards
from lightning_fed.masks import SignAgreement
from lightning_fed.models import ImageClassifier, LeNet

pytestmark = pytest.mark.slow

SEED, ROUNDS, COHORT = 5, 3, 3
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
SGD: MakeOptimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)
ADAM: MakeOptimizer = partial(torch.optim.Adam, lr=1e-3)
METHODS = pytest.mark.parametrize(
    ("make_optimizer", "threshold"),
    [(SGD, None), (SGD, 0.4), (ADAM, None), (ADAM, 0.4)],
    ids=["momentum", "momentum-masked", "adam", "adam-masked"],
)


def train_plainly(
    model: nn.Module, images: Tensor, labels: Tensor, clients: Sequence[np.ndarray], batch_size: int, epochs: int,
    make_optimizer: MakeOptimizer, threshold: float | None,
) -> None:  # fmt: skip
    """The whole of federated averaging, and of its sign mask if there is a threshold, in plain torch."""
    params, statistics = list(model.parameters()), list(model.buffers())
    for round in range(1, ROUNDS + 1):
        draw = numpy_generator_for(SEED, Purpose.SAMPLE, round)
        cohort = sorted(draw.choice(len(clients), size=COHORT, replace=False, shuffle=False).tolist())
        start = [tensor.detach().clone() for tensor in (*params, *statistics)]
        sums = [torch.zeros_like(p) for p in params]
        votes = [torch.zeros_like(p) for p in params]
        averages = [torch.zeros_like(b, dtype=torch.float64) for b in statistics]
        for client in cohort:
            rows = torch.from_numpy(clients[client])
            with torch.no_grad():
                for tensor, value in zip((*params, *statistics), start, strict=True):
                    tensor.copy_(value)
            optimizer = make_optimizer(params)
            seed_everywhere(seed_for(SEED, Purpose.LOCAL, round, client))
            shuffle = generator_for(SEED, Purpose.SHUFFLE, round, client)
            for _ in range(epochs):
                for batch in rows[torch.randperm(len(rows), generator=shuffle)].split(batch_size):
                    optimizer.zero_grad()
                    cross_entropy(model(images[batch]), labels[batch]).backward()
                    optimizer.step()
            with torch.no_grad():
                for p, w, total, vote in zip(params, start, sums, votes, strict=False):
                    total.add_(p - w, alpha=len(rows))
                    vote.add_(torch.sign(p - w))
                for b, total in zip(statistics, averages, strict=True):
                    total.add_(b, alpha=len(rows)) if b.is_floating_point() else total.clamp_(min=b)
        samples = sum(len(clients[client]) for client in cohort)
        with torch.no_grad():
            for p, w, total, vote in zip(params, start, sums, votes, strict=False):
                agreed = vote.abs() / COHORT
                mask = 1.0 if threshold is None else torch.where(agreed >= threshold, 1.0, agreed)
                p.copy_(w + mask * (total / samples))
            for b, total in zip(statistics, averages, strict=True):
                b.copy_(total / samples if b.is_floating_point() else total)


def train_by_the_trainer(
    module: LightningModule, data: FederatedDataModule, folder: Path, threshold: float | None, **options: Any
) -> list[np.ndarray]:
    """Returns each client's rows of the training set."""
    aggregator = FedAvg(mask=None if threshold is None else SignAgreement(threshold))
    as_asked = {"engine": "sequential", "memory_format": "preserve", **options}
    FederatedTrainer(
        accelerator="cpu", logger=False, callbacks=[aggregator], default_root_dir=str(folder), seed=SEED,
        max_rounds=ROUNDS, clients_per_round=COHORT, enable_progress_bar=False, enable_checkpointing=False, **as_asked,
    ).fit(module, data)  # fmt: skip
    return np.split(data.split.index, data.split.offsets[1:-1])


def expect_equal(trained: nn.Module, plain: nn.Module, fresh: nn.Module) -> None:
    """All parameters and buffers are equal to the bit, and none is where it began."""
    for ours, theirs, before in zip(
        trained.state_dict().items(), plain.state_dict().values(), fresh.state_dict().values(), strict=True
    ):
        assert torch.equal(ours[1], theirs), ours[0]
        assert not torch.equal(theirs, before), ours[0]


def read_idx(path: Path, header: int) -> np.ndarray:
    packed = path.with_name(f"{path.name}.gz")
    content = path.read_bytes() if path.is_file() else gzip.decompress(packed.read_bytes())
    return np.frombuffer(content, np.uint8, offset=header)


def plain_lenet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def made_from(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(seed)
    return make()


@pytest.fixture(scope="module")
def clothes(data_root: Path) -> tuple[Tensor, Tensor]:
    raw = data_root / "FashionMNIST" / "raw"
    images = torch.from_numpy(read_idx(raw / "train-images-idx3-ubyte", 16).reshape(-1, 1, 28, 28).copy()).float()
    labels = torch.from_numpy(read_idx(raw / "train-labels-idx1-ubyte", 8).astype(np.int64))
    return images.div_(255).sub_(0.2860).div_(0.3530), labels


@pytest.fixture(scope="module")
def fashion(data_root: Path) -> FashionMNIST:
    return FashionMNIST(data_root, num_clients=100, partitioner=Shards(classes_per_client=2), batch_size=32)


@METHODS
def test_lenet_on_clothes(
    fashion: FashionMNIST, clothes: tuple[Tensor, Tensor], tmp_path: Path, make_optimizer: MakeOptimizer,
    threshold: float | None,
) -> None:  # fmt: skip
    module = ImageClassifier(made_from(1, LeNet), optimizer=make_optimizer)
    plain, fresh = made_from(1, plain_lenet), made_from(1, plain_lenet)
    clients = train_by_the_trainer(module, fashion, tmp_path, threshold, limit_val_batches=0)
    train_plainly(plain, *clothes, clients, 32, 1, make_optimizer, threshold)
    assert sorted(map(len, clients)) == [600] * 100
    expect_equal(module.backbone.layers, plain, fresh)


def test_lenet_in_channels_last(fashion: FashionMNIST, clothes: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    module = ImageClassifier(made_from(1, LeNet), optimizer=SGD)
    plain, fresh = made_from(1, plain_lenet).to(memory_format=torch.channels_last), made_from(1, plain_lenet)
    options: dict[str, Any] = {"limit_val_batches": 0, "memory_format": "channels_last"}
    clients = train_by_the_trainer(module, fashion, tmp_path, None, **options)
    train_plainly(plain, *clothes, clients, 32, 1, SGD, None)
    expect_equal(module.backbone.layers, plain, fresh)
    assert module.backbone.layers[3].weight.stride() == plain[3].weight.stride() != fresh[3].weight.stride()


class Uneven(Partitioner):
    """Some clients hold ten times the samples of others."""

    def assign(self, targets: Any, num_samples: int, num_clients: int, generator: np.random.Generator) -> np.ndarray:
        shares = np.arange(1, num_clients + 1) / (num_clients * (num_clients + 1) / 2)
        return generator.choice(num_clients, p=shares, size=num_samples)


def dropout_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.2), nn.Flatten(),
        nn.Linear(128, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10),
    )  # fmt: skip


@METHODS
def test_batchnorm_and_dropout_on_digits(
    tmp_path: Path, make_optimizer: MakeOptimizer, threshold: float | None
) -> None:
    inputs, targets = load_digits(return_X_y=True)
    images = torch.from_numpy(inputs.astype(np.float32) / 16).reshape(-1, 1, 8, 8)
    labels = torch.from_numpy(targets.astype(np.int64))
    held_out = TensorDataset(images[:100], labels[:100])
    data = FederatedDataModule(
        TensorDataset(images, labels), Uneven(), num_clients=10, batch_size=13, val_dataset=held_out
    )
    module = ImageClassifier(made_from(2, dropout_net), optimizer=make_optimizer)
    plain, fresh = made_from(2, dropout_net), made_from(2, dropout_net)
    clients = train_by_the_trainer(module, data, tmp_path, threshold, local_epochs=2)
    train_plainly(plain, images, labels, clients, 13, 2, make_optimizer, threshold)
    assert len(set(map(len, clients))) > 5
    expect_equal(module.backbone, plain, fresh)
