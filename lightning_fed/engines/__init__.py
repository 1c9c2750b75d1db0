"""How a cohort is trained, apart from what is computed."""

from lightning_fed.engines.base import ClientTrainer, Engine, FinishedClient
from lightning_fed.engines.choice import make_engine
from lightning_fed.engines.sequential import SequentialTrainer
from lightning_fed.engines.vectorized import VectorizedTrainer

__all__ = ["ClientTrainer", "Engine", "FinishedClient", "SequentialTrainer", "VectorizedTrainer", "make_engine"]

SequentialEngine, VectorizedEngine = SequentialTrainer, VectorizedTrainer  # as they were called before
