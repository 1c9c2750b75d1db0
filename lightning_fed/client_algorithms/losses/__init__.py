"""Client algorithms that change the loss of a local step."""

from lightning_fed.client_algorithms.losses.base import LossAlgorithm, LossCall, ModelPass
from lightning_fed.client_algorithms.losses.by_counts import FedLC, FedRS, LogitAdjustment
from lightning_fed.client_algorithms.losses.distillation import MOON, FedNTD
from lightning_fed.client_algorithms.losses.fediir import FedIIR
from lightning_fed.client_algorithms.losses.step import ClientLosses

__all__ = [
    "MOON",
    "ClientLosses",
    "FedIIR",
    "FedLC",
    "FedNTD",
    "FedRS",
    "LogitAdjustment",
    "LossAlgorithm",
    "LossCall",
    "ModelPass",
]
