"""Aggregators over several rounds of reduced updates, called as the trainer calls them."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule

from lightning_fed.aggregators import Aggregator
from lightning_fed.core.reduction import RoundReducer
from lightning_fed.core.updates import Client, Cohort, Update

SIZES, REGISTERED = [7, 1, 30, 12], 9


class Module(LightningModule):
    def log_dict(self, *args: Any, **kwargs: Any) -> None:
        """Takes what the mask reports."""

    log = log_dict


class Server:
    """The global vector and the part of a round that the aggregator sees.

    ``fit`` and ``resumed`` call the hooks in the trainer's order.
    """

    def __init__(self, aggregator: Aggregator, start: np.ndarray, state: dict[str, Any] | None = None) -> None:
        self.aggregator, self.weights = aggregator, torch.tensor(start)
        vector = SimpleNamespace(names=("w",), parameters=[self.weights])
        self.trainer: Any = SimpleNamespace(weights=self.weights, vector=vector, seed=0, optimizers=[], callbacks=[])
        aggregator.setup(self.trainer, Module(), "fit")
        if state is not None:
            aggregator.load_state_dict(state)
        aggregator.on_fit_start(self.trainer, Module())

    def reduce(self, deltas: np.ndarray, sizes: Sequence[int], distances: Sequence[float] | None = None) -> Any:
        reducer = RoundReducer(self.weights, self.aggregator.all_needs, REGISTERED)
        reducer.reset(len(deltas))
        self.aggregator.on_round_start(self.trainer, Module(), Cohort(1, ()))
        for i, (delta, size) in enumerate(zip(deltas, sizes, strict=True)):
            client = Client(i, size, 1)
            update = Update(client, torch.tensor(delta), 1, {}, self.aggregator.client_weight(client))
            update.distance = 1.0 if distances is None else distances[i]
            self.aggregator.on_client_end(self.trainer, Module(), update)
            reducer.add(update, average_buffers=False)
            self.aggregator.on_client_entered(self.trainer, Module(), update)
        return reducer.reduce(1)

    def round(self, deltas: np.ndarray, sizes: Sequence[int], distances: Sequence[float] | None = None) -> np.ndarray:
        """Steps the global vector by a round; returns a copy of it."""
        with torch.no_grad():
            self.aggregator.step(self.trainer, Module(), self.reduce(deltas, sizes, distances))
        return self.weights.numpy().copy()


def rounds(count: int = 5, dtype: Any = np.float64) -> tuple[np.ndarray, np.ndarray]:
    """A start and the updates of four clients over some rounds, some of them zero."""
    rng = np.random.default_rng(0)
    deltas = rng.normal(size=(count, 4, 6)) * (rng.random((count, 4, 6)) > 0.2)
    return rng.normal(size=6).astype(dtype), deltas.astype(dtype)


def run(aggregator: Aggregator, start: np.ndarray, deltas: np.ndarray) -> np.ndarray:
    server = Server(aggregator, start)
    return np.stack([server.round(each, SIZES) for each in deltas])
