"""Clients whose gradients can be written down, and a net that a careless extra pass would disturb."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import Metric

from lightning_fed import FederatedTrainer
from lightning_fed.client_algorithms import ClientAlgorithm
from lightning_fed.data import IID, FederatedDataModule
from tests.parts import BySizes, Classifier

SIZES = [1, 3, 2]
STRENGTHS = np.array([1.0, 2.0, 2.0, 2.0, 0.5, 0.5])  # of each sample: one for each client
TARGETS = np.array([[3.0, 0.0], [0.0, -4.0], [1.0, -5.0], [2.0, -6.0], [-1.0, 1.0], [-3.0, 2.0]])


def gradients_by_hand(w: np.ndarray) -> np.ndarray:
    """Each client's gradient at w, shape (3, 2)."""
    samples = STRENGTHS[:, None] * (w - TARGETS)
    return np.stack([part.mean(axis=0) for part in np.split(samples, np.cumsum(SIZES)[:-1])])


def quadratic_data() -> FederatedDataModule:
    """Three clients; one batch holds all that a client has."""
    tensors = TensorDataset(torch.tensor(STRENGTHS).float(), torch.tensor(TARGETS).float())
    return FederatedDataModule(tensors, BySizes(*SIZES), num_clients=3, batch_size=8)


class Correct(Metric):
    """Share of right answers; adds in place, as many metrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("right", default=torch.tensor(0.0))
        self.add_state("seen", default=torch.tensor(0.0))

    def update(self, scores: Tensor, labels: Tensor) -> None:
        self.right += (scores.argmax(dim=1) == labels).sum()
        self.seen += len(labels)

    def compute(self) -> Tensor:
        return self.right / self.seen


class Net(LightningModule):
    """Dropout, BatchNorm and a metric with a state."""

    trains_metric = True

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
        self.accuracy = Correct()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.layers(batch[0])
        if self.trains_metric:
            self.accuracy.update(scores.detach(), batch[1])
            self.log("train/acc", self.accuracy, on_epoch=True, on_step=False)
        return nn.functional.cross_entropy(scores, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.01)


def net_data(**options: Any) -> FederatedDataModule:
    """Four clients of 12 or 13 samples, in batches of 5."""
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(3))
    return FederatedDataModule(TensorDataset(x, (x.sum(1) > 0).long()), IID(), num_clients=4, batch_size=5, **options)


class KeepsTrained(ClientAlgorithm):
    """Takes for a client's own model the one that it has trained last."""

    has_own_model = True

    def on_client_entered(self, trainer: Any, pl_module: Any, update: Any) -> None:
        trainer.client_states.store("mine", update.client.id, trainer.vector.data)

    def load_own(self, trainer: Any, client: int) -> None:
        kept = torch.empty_like(trainer.weights)
        if trainer.client_states.recall("mine", client, kept):
            trainer.vector.data.copy_(kept)


def trainer_for(folder: Path, *callbacks: Callback, **options: Any) -> FederatedTrainer:
    """A quiet trainer of three rounds that writes metrics.csv."""
    quiet: dict[str, Any] = {"logger": [], "enable_checkpointing": False, "enable_progress_bar": False}
    options = {"accelerator": "cpu", "seed": 0, "max_rounds": 3, **quiet, **options}
    return FederatedTrainer(callbacks=list(callbacks), default_root_dir=str(folder), **options)


def columns(trainer: FederatedTrainer) -> dict[str, dict[int, float]]:
    """What metrics.csv holds: by column and round, without empty cells."""
    assert trainer.run is not None
    found: dict[str, dict[int, float]] = {}
    with trainer.run.metrics.open(newline="") as file:
        for row in csv.DictReader(file):
            for name, cell in row.items():
                if cell:
                    found.setdefault(name, {})[int(row["round"])] = float(cell)
    return found


class Measured(Classifier):
    """Logs loss and accuracy, in double precision."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.accuracy = Correct()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.accuracy.update(self(batch[0]), batch[1])
        self.log("val_acc", self.accuracy)
