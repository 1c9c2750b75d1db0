"""How a cohort is trained, apart from what is computed."""

from lightning_fed.engines.base import Engine
from lightning_fed.engines.choice import make_engine
from lightning_fed.engines.sequential import SequentialEngine
from lightning_fed.engines.vectorized import VectorizedEngine

__all__ = ["Engine", "SequentialEngine", "VectorizedEngine", "make_engine"]
