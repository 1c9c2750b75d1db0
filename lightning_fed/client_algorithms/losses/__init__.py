"""Client algorithms that change the loss of a local step."""

from lightning_fed.client_algorithms.losses.base import LossAlgorithm, LossCall, ModelPass
from lightning_fed.client_algorithms.losses.methods import MOON, FedIIR, FedLC, FedNTD, FedRS, LogitAdjustment
from lightning_fed.client_algorithms.losses.step import ClientLosses

__all__ = [
    "MOON", "ClientLosses", "FedIIR", "FedLC", "FedNTD", "FedRS", "LogitAdjustment", "LossAlgorithm", "LossCall",
    "ModelPass",
]  # fmt: skip
