"""Callbacks that measure and change nothing."""

from lightning_fed.callbacks.diagnostics.agreement import UpdateAgreement
from lightning_fed.callbacks.diagnostics.clients import ClientEvaluation
from lightning_fed.callbacks.diagnostics.dissimilarity import GradientDissimilarity
from lightning_fed.callbacks.diagnostics.geometry import UpdateGeometry

__all__ = ["ClientEvaluation", "GradientDissimilarity", "UpdateAgreement", "UpdateGeometry"]
