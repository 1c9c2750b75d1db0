"""Aggregators with server state in whole runs of the trainer: resumed in the middle, and beside BatchNorm's buffers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from lightning_fed import FederatedError, FederatedTrainer
from lightning_fed.aggregators import (
    AFL,
    FedACG,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedDGGA,
    FedDynServer,
    FedExP,
    FedNova,
    FedYogi,
    ServerOptimizer,
)
from lightning_fed.client_algorithms import FedCM, MimeLite
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.data import IID, Digits, FederatedDataModule, Partitioner
from lightning_fed.masks import SignAgreement
from lightning_fed.models import MLP, ImageClassifier
from tests.parts import Classifier, federated_data, federated_trainer

EVERY: list[Any] = [
    FedAvgM, FedACG, FedExP, FedAdagrad, FedAdam, FedYogi, FedNova, FedDynServer,
    lambda **options: ServerOptimizer(lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5), **options),
]  # fmt: skip
IDS = [
    "FedAvgM",
    "FedACG",
    "FedExP",
    "FedAdagrad",
    "FedAdam",
    "FedYogi",
    "FedNova",
    "FedDynServer",
    "ServerOptimizer",
]
every = pytest.mark.parametrize("make", EVERY, ids=IDS)


class Halves(Partitioner):
    """Each client gets about twice as much as the next."""

    def assign(self, targets: Any, num_samples: int, num_clients: int, generator: Any) -> Any:
        parts = [0.5**i for i in range(num_clients)]
        return generator.choice(num_clients, size=num_samples, p=[part / sum(parts) for part in parts])


def digits(**options: Any) -> Digits:
    return Digits(num_clients=5, partitioner=Halves(), batch_size=32, **options)


def classifier(optimizer: Any = torch.optim.SGD) -> ImageClassifier:
    torch.manual_seed(0)
    return ImageClassifier(MLP(64, (8,)), optimizer=lambda params: optimizer(params, lr=0.05))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(folder: Path, model: Any, data: Any, rounds: int, *callbacks: Any, **options: Any) -> FederatedTrainer:
    """Trains up to a round, from the last checkpoint if there is one."""
    options = {"seed": 0, "clients_per_round": 3, **options}
    trainer = FederatedTrainer(
        accelerator="cpu", logger=[], callbacks=list(callbacks), default_root_dir=str(folder), max_rounds=rounds,
        enable_progress_bar=False, **options,
    )  # fmt: skip
    trainer.fit(model, data, ckpt_path="last")
    return trainer


@every
@pytest.mark.quick(2)
def test_a_run_resumed_in_the_middle_has_the_same_bits(make: Any, tmp_path: Path) -> None:
    whole = classifier()
    train(tmp_path / "whole", whole, digits(), 3, make(mask=SignAgreement()))
    train(tmp_path / "parts", classifier(), digits(), 2, make(mask=SignAgreement()))
    parts = classifier()
    trainer = train(tmp_path / "parts", parts, digits(), 3, make(mask=SignAgreement()))
    assert trainer.resumed
    assert torch.equal(weights(parts), weights(whole))
    plain = classifier()
    train(tmp_path / "plain", plain, digits(), 3, FedAvg(mask=SignAgreement()))
    assert not torch.allclose(weights(plain), weights(whole))


def test_fednova_is_fedavg_when_all_clients_take_the_same_steps(tmp_path: Path) -> None:
    models = {}
    for name, aggregator, steps in (
        ("nova", FedNova(), 4), ("avg", FedAvg(), 4), ("nova epochs", FedNova(), None), ("avg epochs", FedAvg(), None),
    ):  # fmt: skip
        models[name] = classifier(lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9))
        train(tmp_path / name, models[name], digits(), 2, aggregator, local_steps=steps)
    vectors = {name: weights(model) for name, model in models.items()}
    torch.testing.assert_close(vectors["nova"], vectors["avg"], rtol=0, atol=1e-6)
    assert (vectors["nova epochs"] - vectors["avg epochs"]).abs().max() > 1e-3


class NeverTrains(FederatedCallback):
    def on_client_start(self, trainer: Any, pl_module: Any, client: Any) -> None:
        raise AssertionError("a client trained")


def test_optimizers_that_cannot_work_are_refused_before_any_training(tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match="got Adam, which divides"):
        train(tmp_path, classifier(torch.optim.Adam), digits(), 1, FedNova(), NeverTrains())
    with pytest.raises(FederatedError, match="got LBFGS"):
        train(tmp_path, classifier(), digits(), 1, ServerOptimizer(torch.optim.LBFGS), NeverTrains())


# Buffers


class Shrinking(LightningModule):
    """BatchNorm whose running variance starts at 1 and falls to nearly 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(4, momentum=0.7), nn.Linear(4, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return cross_entropy(self.layers(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Statistics(FederatedCallback):
    """Notes the weighted mean of the clients' variances, and the global variance, after every round."""

    def __init__(self) -> None:
        self.sent: list[tuple[float, Tensor]] = []
        self.means: list[Tensor] = []
        self.kept: list[Tensor] = []
        self.counts: list[int] = []

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.sent.append((update.weight, update.buffers["layers.0.running_var"].double()))

    def on_after_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
        total = sum(weight for weight, _ in self.sent)
        self.means.append(torch.stack([value * (weight / total) for weight, value in self.sent]).sum(0))
        self.sent.clear()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.kept.append(pl_module.layers[0].running_var.double())
        self.counts.append(int(pl_module.layers[0].num_batches_tracked))


@every
@pytest.mark.parametrize("mask", [None, SignAgreement(0.9)], ids=["plain", "masked"])
@pytest.mark.quick(8)
def test_buffers_do_not_go_through_the_server_rule(make: Any, mask: Any, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        1e-3 * torch.randn(60, 4, generator=generator), torch.randint(0, 3, (60,), generator=generator)
    )
    statistics, module = Statistics(), Shrinking()
    train(
        tmp_path, module, FederatedDataModule(data, IID(), num_clients=3, batch_size=20), 4, statistics,
        make(mask=mask, lr=1.0),
    )  # fmt: skip
    for mean, kept in zip(statistics.means, statistics.kept, strict=True):
        torch.testing.assert_close(kept, mean, rtol=1e-6, atol=0)
        assert (kept > 0).all()
    assert (statistics.kept[-1] < 0.02).all()
    assert statistics.counts == [1, 2, 3, 4]
    # Momentum would have carried the variance below zero.
    changes = torch.stack([torch.ones(4, dtype=torch.float64), *statistics.kept]).diff(dim=0)
    momentum, carried = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    for change in changes[:2]:
        momentum = 0.9 * momentum + change
        carried = carried + momentum
    assert (carried < 0).all()


@pytest.mark.parametrize("make", [AFL, lambda: FedDGGA(losses_over="train"), FedCM, MimeLite])
def test_what_is_kept_is_forgotten_by_a_second_fit(make: Any, tmp_path: Path) -> None:
    """Weights of clients, and a momentum."""
    made, found = make(), []
    for _ in range(2):
        torch.manual_seed(0)
        trainer = federated_trainer(tmp_path, made, max_rounds=3)
        trainer.fit(Classifier(), federated_data(8, 20, 12))
        found.append(trainer.weights.clone())
    assert torch.equal(*found)
