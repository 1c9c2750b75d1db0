"""Runs of one method in a process and over a fleet, each node with the data of its own clients alone."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import TensorDataset

from lightning_fed import FederatedTrainer
from lightning_fed.data import FederatedDataModule
from lightning_fed.trainer.fleet import LocalFleet, Node
from tests.composition.composition_parts import BATCH, SIZES, make_data, make_samples, start
from tests.parts import BySizes

# The clients of each node, of which client 2 has no samples, and in no order.
SHARES = {"a": [3, 0], "b": [1, 2], "c": [4, 5]}
Make = Callable[..., FederatedTrainer]


def data_of(clients: Sequence[int], batch_size: int = BATCH) -> FederatedDataModule:
    """The data of some clients of ``make_data`` alone."""
    ends = np.cumsum(SIZES["unequal"])
    rows = np.concatenate([np.arange(ends[each] - SIZES["unequal"][each], ends[each]) for each in clients])
    inputs, labels = make_samples("unequal").tensors
    sizes = [SIZES["unequal"][each] for each in clients]
    own = TensorDataset(inputs[rows], labels[rows])
    return FederatedDataModule(own, BySizes(*sizes), num_clients=len(clients), batch_size=batch_size)


def fleet_of(
    make: Make, kind: Callable[..., LocalFleet] = LocalFleet, net: Callable[[], LightningModule] = start,
    folder: Path | None = None, batch_size: int = BATCH, shares: dict[str, list[int]] = SHARES,
) -> Any:  # fmt: skip
    """A fleet of nodes with their own trainer, module and data."""
    folders = {name: None if folder is None else folder / name for name in shares}
    nodes = {
        name: Node(make(), net(), data_of(clients, batch_size), clients, folders[name])
        for name, clients in shares.items()
    }
    return kind(nodes)


def fit(trainer: FederatedTrainer, fleet: Any = None, batch_size: int = BATCH, **options: Any) -> FederatedTrainer:
    """Trains ``start()`` on ``make_data``, or over a fleet, whose run ends too."""
    trainer.fleet = fleet
    try:
        trainer.fit(start(), datamodule=make_data("unequal", batch_size) if fleet is None else None, **options)
    finally:
        if fleet is not None:
            fleet.close()
    return trainer


def rows_of(trainer: FederatedTrainer) -> dict[str, float]:
    """What the last round logged, without times and what only a fleet says."""
    return {
        name: float(value)
        for name, value in trainer.logged_metrics.items()
        if not name.startswith(("time/", "fleet/")) and name != "clients/failed"
    }


def same_buffers(one: FederatedTrainer, other: FederatedTrainer) -> bool:
    """Whether the global models have equal buffers, bit for bit."""
    pairs = zip(one.lightning_module.buffers(), other.lightning_module.buffers(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
