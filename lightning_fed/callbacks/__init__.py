"""Callbacks that come with the trainer: checkpoints, progress, diagnostics, and changes to updates on their way."""

from lightning_fed.callbacks.checkpoint import FederatedCheckpoint
from lightning_fed.callbacks.diagnostics import (
    ClientEvaluation,
    DistributionGap,
    FinalPictures,
    GradientDissimilarity,
    UpdateAgreement,
    UpdateGeometry,
)
from lightning_fed.callbacks.frozen import FrozenParameters
from lightning_fed.callbacks.payload import QSGD, ClipUpdates, Payload, RandomK, TopK
from lightning_fed.callbacks.privacy import CentralDP, LocalDP
from lightning_fed.callbacks.progress import FederatedProgressBar

__all__ = [
    "CentralDP", "ClientEvaluation", "QSGD", "ClipUpdates", "DistributionGap", "FederatedCheckpoint",
    "FederatedProgressBar", "FinalPictures", "FrozenParameters", "GradientDissimilarity", "LocalDP", "Payload",
    "UpdateAgreement", "UpdateGeometry", "RandomK", "TopK",
]  # fmt: skip
