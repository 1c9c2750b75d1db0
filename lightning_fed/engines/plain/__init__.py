"""Local training without the run's method, of which nothing stays."""

from lightning_fed.engines.plain.engine import all_parameters, plain_training

__all__ = ["all_parameters", "plain_training"]
