"""How a cohort is trained, apart from what is computed."""

from lightning_fed.engines.base import Engine
from lightning_fed.engines.sequential import SequentialEngine

__all__ = ["Engine", "SequentialEngine"]
