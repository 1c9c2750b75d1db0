"""Small data, the four skews, and what reads batches through them."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from lightning_fed.core.seeding import Purpose, numpy_generator_for
from lightning_fed.data import BinaryColors, ClassColors, ClientColors, ClientRotation, FeatureSkew, FederatedDataModule
from lightning_fed.data.skews import DataFacts, SkewedBatches
from tests.parts import OneByOne

N, CLASSES = 120, 6
X = torch.rand(N, 1, 7, 9, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % CLASSES
SKEWS: list[FeatureSkew] = [ClientColors(), ClientRotation(), BinaryColors(label_noise=0.2), ClassColors()]


# The same samples, computed one by one, as dicts.
DICTS = OneByOne(N, lambda row: {"image": X[row], "label": int(Y[row]), "row": row}, targets=Y)


def module(skew: FeatureSkew | None, dataset: Dataset[Any] | None = None, **options: Any) -> FederatedDataModule:
    train = TensorDataset(X, Y) if dataset is None else dataset
    values: dict[str, Any] = {"num_clients": 4, "batch_size": 7, "split_seed": 3, "test_dataset": train, **options}
    return FederatedDataModule(train, skew=skew, **values)


def prepared(skew: FeatureSkew, clients: int = 4, seed: int = 0, classes: int = CLASSES, **facts: Any) -> FeatureSkew:
    return skew.prepare(clients, seed, DataFacts(X[0], classes, **facts))


def by_row(
    data: FederatedDataModule, generator: torch.Generator, batch_size: int | None
) -> list[tuple[Tensor, Tensor]]:
    """Reads every client's samples in a random order and sorts them by row."""
    source = data.train_source()
    samples: dict[int, tuple[Tensor, Tensor]] = {}
    for client in range(len(source.sizes) - 1, -1, -1):
        order = torch.randperm(int(source.sizes[client]), generator=generator)
        rows = data.split.index[data.split.offsets[client] :][order.numpy()].tolist()
        found: list[tuple[Tensor, Tensor]] = []
        for batch in source.batches(client, order, 0, batch_size):
            x, y = (batch["image"], batch["label"]) if isinstance(batch, dict) else batch
            assert not isinstance(batch, dict) or batch["row"].tolist() == rows[len(found) : len(found) + len(x)]
            found += list(zip(x, y, strict=True))
        samples.update(zip(rows, found, strict=True))
    return [samples[row] for row in sorted(samples)]


def equal(a: list[tuple[Tensor, Tensor]], b: list[tuple[Tensor, Tensor]]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, u) and y.dtype == v.dtype and torch.equal(y, v) for (x, y), (u, v) in zip(a, b, strict=True)
    )


def eval_parts(loader: Any) -> tuple[Tensor, Tensor]:
    assert isinstance(loader, SkewedBatches)
    batches = [(b["image"], b["label"]) if isinstance(b, dict) else tuple(b) for b in loader]
    assert len(loader) == len(batches)
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def generator_of(skew: FeatureSkew) -> np.random.Generator:
    return numpy_generator_for(skew._seed, Purpose.SKEW)
