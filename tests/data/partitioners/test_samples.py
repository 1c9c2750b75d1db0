"""Which samples of a class a client gets is random, whatever their order in the data set."""

import numpy as np
import pytest
from scipy import stats

from lightning_fed.data import (
    IID,
    DirichletBalanced,
    DirichletByClass,
    DirichletByClient,
    ExactClasses,
    Partitioner,
    PowerLaw,
    QuantityDirichlet,
    Shards,
)

NUM_CLASSES, SIZE, NUM_CLIENTS = 4, 1000, 20


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize(
    "partitioner",
    [
        IID(), Shards(2), ExactClasses(1), ExactClasses(2), DirichletByClient(1.0), DirichletByClass(0.5),
        DirichletBalanced(0.5), QuantityDirichlet(2.0), PowerLaw(1.0),
    ],
    ids=lambda partitioner: type(partitioner).__name__,
)  # fmt: skip
def test_a_clients_samples_of_a_class_are_random_ones(partitioner: Partitioner, shuffled: bool) -> None:
    """Kruskal and Wallis' test of the places in a class by client, each class of each split failing 1 in 10,000."""
    targets = np.repeat(np.arange(NUM_CLASSES), SIZE)
    if shuffled:
        targets = np.random.default_rng(0).permutation(targets)
    for seed in range(3):
        clients = partitioner(targets, len(targets), NUM_CLIENTS, seed)
        owner = np.empty(len(targets), dtype=np.int64)
        owner[np.concatenate(clients)] = np.repeat(np.arange(NUM_CLIENTS), [len(client) for client in clients])
        for label in range(NUM_CLASSES):
            owners = owner[targets == label]
            groups = [np.flatnonzero(owners == client) for client in np.unique(owners)]
            assert stats.kruskal(*(group for group in groups if len(group) >= 5)).pvalue > 1e-4
