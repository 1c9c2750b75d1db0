"""The clients of `lightning_fed.lab.testing`, and single steps of the server by hand."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule

from lightning_fed.aggregators import Aggregator
from lightning_fed.core.reduction import RoundReducer
from lightning_fed.core.updates import Client, Cohort, ReducedUpdate, Update
from lightning_fed.lab.testing import LR, STRENGTHS, TARGETS, train_quadratics
from lightning_fed.lab.testing import Quadratics as Quadratic
from lightning_fed.lab.testing import local_ends as train_by_hand

__all__ = [
    "LR", "STRENGTHS", "TARGETS", "Logged", "Quadratic", "gradients_by_hand", "step_by_hand", "train_by_hand",
    "weights_after",
]  # fmt: skip


def weights_after(
    folder: Path, aggregator: Aggregator, rounds: int = 1, steps: int = 1, *callbacks: Any, **given: Any
) -> np.ndarray:
    """Trains the three clients, or others; returns the global w, shape (2,)."""
    options = {"rounds": rounds, "steps": steps, "default_root_dir": str(folder), **given}
    return train_quadratics(aggregator, *callbacks, **options)


def gradients_by_hand(points: np.ndarray) -> np.ndarray:
    """Each client's gradient at its own point, shape (3, 2)."""
    return STRENGTHS[:, None] * (points - TARGETS)


class Logged(LightningModule):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, float] = {}

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self.values[name] = float(value)

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        self.values.update({name: float(value) for name, value in dictionary.items()})


def step_by_hand(
    aggregator: Aggregator,
    start: np.ndarray,
    deltas: np.ndarray,
    sizes: list[int],
    gradients: np.ndarray | None = None,
    losses: np.ndarray | None = None,
) -> tuple[np.ndarray, dict[str, float]]:
    """Reduces a cohort as a round does and steps; returns the new w and what was logged."""
    weights = torch.tensor(start)
    vector = SimpleNamespace(names=("w",), parameters=[weights])
    trainer: Any = SimpleNamespace(weights=weights, vector=vector, seed=0)
    module = Logged()
    reducer = RoundReducer(weights, aggregator.all_needs, len(deltas))
    reducer.reset(len(deltas))
    aggregator.on_round_start(trainer, module, Cohort(1, ()))
    for i, (delta, size) in enumerate(zip(deltas, sizes, strict=True)):
        client = Client(i, size, 1)
        update = Update(client, torch.tensor(delta), 1, {}, aggregator.client_weight(client))
        if gradients is not None:
            update.gradient = torch.tensor(gradients[i])
            update.loss = torch.tensor(1.0 if losses is None else losses[i])
        aggregator.on_client_end(trainer, module, update)
        reducer.add(update, average_buffers=False)
        aggregator.on_client_entered(trainer, module, update)
    reduced: ReducedUpdate = reducer.reduce(1)
    aggregator.step(trainer, module, reduced)
    return weights.numpy(), module.values
