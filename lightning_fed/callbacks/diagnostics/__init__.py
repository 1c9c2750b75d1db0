"""Callbacks that measure and change nothing."""

from lightning_fed.callbacks.diagnostics.agreement import UpdateAgreement
from lightning_fed.callbacks.diagnostics.clients import ClientEvaluation
from lightning_fed.callbacks.diagnostics.dissimilarity import GradientDissimilarity
from lightning_fed.callbacks.diagnostics.final_pictures import FinalPictures
from lightning_fed.callbacks.diagnostics.gap import DistributionGap
from lightning_fed.callbacks.diagnostics.geometry import UpdateGeometry

__all__ = [
    "ClientEvaluation",
    "DistributionGap",
    "FinalPictures",
    "GradientDissimilarity",
    "UpdateAgreement",
    "UpdateGeometry",
]
