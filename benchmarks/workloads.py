"""The work that both sides of a row do: data, split, network and local optimizer, made from seeds without Lightning."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["WORKS", "Data", "Work", "make_network"]


@dataclass(frozen=True)
class Data:
    """Random images and their split.

    Attributes:
        images: Inputs, shape (n, ...), float32.
        labels: Classes, shape (n,), int64.
        clients: Sample indices of each client.
    """

    images: Tensor
    labels: Tensor
    clients: list[Tensor]

    @property
    def users(self) -> Tensor:
        """The client that each sample belongs to, shape (n,), int64."""
        users = torch.empty(len(self.labels), dtype=torch.int64)
        for client, rows in enumerate(self.clients):
            users[rows] = client
        return users

    def to(self, device: str) -> "Data":
        """Moves everything to a device."""
        return Data(self.images.to(device), self.labels.to(device), [rows.to(device) for rows in self.clients])


@dataclass(frozen=True)
class Work:
    """A round of federated averaging: every drawn client trains for one epoch.

    Attributes:
        key: Its short name.
        text: What it is.
        network: Name of the network in ``make_network``.
        shape: Shape of an image.
        clients: Registered clients.
        size: Samples of each.
        per_round: Clients drawn each round.
        batch: Samples in a batch.
        lr: Learning rate of the clients' SGD.
        momentum: Its momentum.
        rounds: Rounds in one repeat.
        repeats: Repeats of a row where nothing else is asked for.
    """

    key: str
    text: str
    network: str
    shape: tuple[int, ...]
    clients: int
    size: int
    per_round: int
    batch: int
    lr: float = 0.01
    momentum: float = 0.9
    rounds: int = 1
    repeats: int = 15

    @property
    def steps(self) -> int:
        """Local steps in a round."""
        return self.per_round * -(-self.size // self.batch)

    @property
    def samples(self) -> int:
        """Samples seen in a round."""
        return self.per_round * self.size

    def data(self) -> Data:
        """Draws images, labels and a random split into clients of equal size."""
        generator = torch.Generator().manual_seed(0)
        count = self.clients * self.size
        images = torch.randn(count, *self.shape, generator=generator)
        labels = torch.randint(10, (count,), generator=generator)
        rows = torch.from_numpy(np.random.default_rng(0).permutation(count))
        return Data(images, labels, list(rows.split(self.size)))

    def model(self) -> nn.Module:
        """Makes the network with the same weights each time."""
        torch.manual_seed(0)
        return make_network(self.network)


WORKS = {
    work.key: work
    for work in (
        Work("A", "LeNet, 100 clients of 600 images of 1x28x28, 10 per round, batch 32", "lenet", (1, 28, 28),
             clients=100, size=600, per_round=10, batch=32),
        Work("B", "logistic regression, 1,000 clients of 60 images of 1x28x28, 100 per round, batch 20", "logistic",
             (1, 28, 28), clients=1000, size=60, per_round=100, batch=20, rounds=5),
        Work("C", "ResNet-18 GN, 10 clients of 100 images of 3x32x32, all in every round, batch 50", "resnet",
             (3, 32, 32), clients=10, size=100, per_round=10, batch=50, repeats=5),
        Work("D", "the 1.6M-parameter CNN of pfl-research, 1,000 clients of 50 images of 3x32x32, 50 per round, "
             "batch 10", "cnn", (3, 32, 32), clients=1000, size=50, per_round=50, batch=10, lr=0.1, momentum=0.0),
    )
}  # fmt: skip


class _PflCNN(nn.Sequential):
    """The CNN of pfl-research's CIFAR-10 benchmark (NeurIPS 2024 Datasets and Benchmarks); 1,626,442 parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
            nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
        )  # fmt: skip


def make_network(name: str) -> nn.Module:
    """Makes a network by name, with weights from torch's global stream."""
    # Here, because the package brings Lightning along, which the yardstick does without.
    from lightning_fed import models

    makers: dict[str, Callable[[], nn.Module]] = {
        "lenet": models.LeNet,
        "logistic": lambda: models.LogisticRegression(784),
        "resnet": models.ResNet18,
        "cnn": _PflCNN,
    }
    return makers[name]()
