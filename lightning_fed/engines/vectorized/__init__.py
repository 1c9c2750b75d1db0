"""Many clients at once."""

from lightning_fed.engines.vectorized.engine import VectorizedTrainer

__all__ = ["VectorizedTrainer"]
