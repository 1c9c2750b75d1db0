"""Callbacks that measure and change nothing."""

from lightning_fed.diagnostics.dissimilarity import GradientDissimilarity

__all__ = ["GradientDissimilarity"]
