"""A second pass over the batch of a local step, at another point."""

from lightning_fed.engines.second_pass.alone import BatchGradient
from lightning_fed.engines.second_pass.base import SecondGradient

__all__ = ["BatchGradient", "SecondGradient"]
