"""Server-side callbacks: each steps the global model at the end of a round."""

from lightning_fed.aggregators.base import Aggregator
from lightning_fed.aggregators.fedavg import FedAvg

__all__ = ["Aggregator", "FedAvg"]
