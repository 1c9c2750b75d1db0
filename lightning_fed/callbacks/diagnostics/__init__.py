"""Callbacks that measure and change nothing."""

from lightning_fed.callbacks.diagnostics.clients import ClientEvaluation
from lightning_fed.callbacks.diagnostics.differences import DistributionGap, GradientDissimilarity
from lightning_fed.callbacks.diagnostics.final_pictures import FinalPictures
from lightning_fed.callbacks.diagnostics.updates import UpdateAgreement, UpdateGeometry

__all__ = [
    "ClientEvaluation", "DistributionGap", "FinalPictures", "GradientDissimilarity", "UpdateAgreement",
    "UpdateGeometry",
]  # fmt: skip
