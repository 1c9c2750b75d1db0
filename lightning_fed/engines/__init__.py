"""How a cohort is trained, apart from what is computed."""

from lightning_fed.engines.sequential import SequentialEngine

__all__ = ["SequentialEngine"]
