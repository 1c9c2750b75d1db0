"""Clients whose training can be written down: client i pulls one vector to b_i with strength a_i."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedTrainer
from lightning_fed.aggregators import Aggregator
from lightning_fed.core.reduction import RoundReducer
from lightning_fed.core.updates import Client, Cohort, ReducedUpdate, Update
from lightning_fed.data import FederatedDataModule, Partitioner

STRENGTHS = np.array([1.0, 2.0, 0.5])
TARGETS = np.array([[3.0, 0.0], [0.0, -4.0], [-1.0, 1.0]])
LR = 0.1


class Quadratic(LightningModule):
    """f_i(w) = ½ a_i ‖w - b_i‖², from w = (1, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        strength, target = batch
        return (0.5 * strength * (self.w - target).square().sum(dim=1)).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


class OneEach(Partitioner):
    """Client i holds sample i."""

    def assign(self, targets: Any, num_samples: int, num_clients: int, generator: Any) -> np.ndarray:
        return np.arange(num_clients)


def weights_after(
    folder: Path,
    aggregator: Aggregator,
    rounds: int = 1,
    steps: int = 1,
    *callbacks: Any,
    strengths: np.ndarray = STRENGTHS,
    targets: np.ndarray = TARGETS,
) -> np.ndarray:
    """Trains the three clients, or others, whole batches, in double precision; returns the global w, shape (2,)."""
    samples = TensorDataset(torch.tensor(strengths), torch.tensor(targets))
    data = FederatedDataModule(samples, OneEach(), num_clients=len(targets))
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = FederatedTrainer(
        accelerator="cpu",
        precision="64-true",
        max_rounds=rounds,
        local_steps=steps,
        callbacks=[aggregator, *callbacks],
        default_root_dir=str(folder),
        **quiet,
    )
    trainer.fit(Quadratic(), data)
    return trainer.weights.numpy()


def train_by_hand(
    w: np.ndarray, steps: int = 1, strengths: np.ndarray = STRENGTHS, targets: np.ndarray = TARGETS
) -> np.ndarray:
    """Where each client ends, shape (n, 2)."""
    ends = np.tile(w, (len(targets), 1))
    for _ in range(steps):
        ends = ends - LR * strengths[:, None] * (ends - targets)
    return ends


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
