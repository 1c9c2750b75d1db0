"""Many clients at once."""

from lightning_fed.engines.vectorized.engine import VectorizedEngine

__all__ = ["VectorizedEngine"]
