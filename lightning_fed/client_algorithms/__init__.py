"""Client-side callbacks: what a client does differently in its local training."""

from lightning_fed.client_algorithms.base import ClientAlgorithm

__all__ = ["ClientAlgorithm"]
