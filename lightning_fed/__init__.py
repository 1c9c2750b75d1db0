"""Federated learning on PyTorch Lightning."""

from lightning_fed.errors import FederatedError
from lightning_fed.hooks import Client, Cohort, FederatedCallback, Update
from lightning_fed.reduction import Need, ReducedUpdate
from lightning_fed.trainer import FederatedTrainer

__all__ = [
    "Client",
    "Cohort",
    "FederatedCallback",
    "FederatedError",
    "FederatedTrainer",
    "Need",
    "ReducedUpdate",
    "Update",
]
__version__ = "0.1.0"
