"""What each of several hospitals has in a file of its own, as a user of the package writes it."""

from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed.data import FederatedDataModule
from lightning_fed.data.partitioners import ByUser


def _read(path: str) -> tuple[TensorDataset, Any]:
    held = np.load(path)
    return TensorDataset(torch.from_numpy(held["x"]), torch.from_numpy(held["y"])), held["owner"]


class Site(FederatedDataModule):
    """Samples of the clients of one file, for training."""

    def __init__(self, path: str, exam: str | None = None, batch_size: int = 10) -> None:
        samples, owner = _read(path)
        val = None if exam is None else _read(exam)[0]
        super().__init__(samples, ByUser(), num_clients=None, users=owner, val_dataset=val, batch_size=batch_size)


class Exam(LightningDataModule):
    """Samples of nobody in the fleet, for validation."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.samples = _read(path)[0]

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.samples, batch_size=256)
