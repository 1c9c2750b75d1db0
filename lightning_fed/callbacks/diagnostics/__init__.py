"""Callbacks that measure and change nothing."""

from lightning_fed.callbacks.diagnostics.clients import ClientEvaluation
from lightning_fed.callbacks.diagnostics.dissimilarity import GradientDissimilarity

__all__ = ["ClientEvaluation", "GradientDissimilarity"]
