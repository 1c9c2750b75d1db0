"""Every partitioner once, what it can work with, and who it gives what."""

import numpy as np
import pytest

from lightning_fed.data.partitioners.base import Partitioner
from lightning_fed.data.partitioners.classes import ExactClasses, Shards
from lightning_fed.data.partitioners.dirichlet import DirichletBalanced, DirichletByClass, DirichletByClient
from lightning_fed.data.partitioners.quantity import IID, ByUser, PowerLaw, QuantityDirichlet

EVERY: dict[str, Partitioner] = {
    "iid": IID(),
    "shards1": Shards(classes_per_client=1),
    "shards2": Shards(classes_per_client=2),
    "shards3": Shards(classes_per_client=3),
    "exact1": ExactClasses(classes_per_client=1),
    "exact2": ExactClasses(classes_per_client=2),
    "client": DirichletByClient(alpha=0.5),
    "class": DirichletByClass(alpha=0.3, min_samples=0),
    "balanced": DirichletBalanced(alpha=0.3, min_samples=0),
    "quantity": QuantityDirichlet(beta=0.5),
    "power": PowerLaw(exponent=1.2),
    "user": ByUser(),
}
every_partitioner = pytest.mark.parametrize("partitioner", EVERY.values(), ids=EVERY)
CLASSES = list(dict.fromkeys(map(type, EVERY.values())))


def values_for(partitioner: Partitioner, targets: np.ndarray, num_clients: int) -> np.ndarray:
    """What a partitioner can work with: as many users as clients, no more classes than clients can hold."""
    if partitioner.reads == "users":
        return np.random.default_rng(0).permutation(np.arange(len(targets)) % num_clients)
    if isinstance(partitioner, ExactClasses):
        return targets % min(7, num_clients * partitioner.classes_per_client)
    return targets


def owners_of(partitioner: Partitioner, targets: np.ndarray, num_clients: int, seed: int) -> np.ndarray:
    """The client of each sample."""
    clients = partitioner(targets, len(targets), num_clients, seed)
    owner = np.empty(len(targets), dtype=np.int64)
    owner[np.concatenate(clients)] = np.repeat(np.arange(num_clients), [len(client) for client in clients])
    return owner
