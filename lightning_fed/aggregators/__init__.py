"""Server-side callbacks: each steps the global model at the end of a round."""

from lightning_fed.aggregators.adaptive import FedAdagrad, FedAdam, FedYogi
from lightning_fed.aggregators.base import Aggregator
from lightning_fed.aggregators.cgw import CGW
from lightning_fed.aggregators.fedavg import FedAvg
from lightning_fed.aggregators.fedavgm import FedAvgM
from lightning_fed.aggregators.feddyn import FedDynServer
from lightning_fed.aggregators.fedgma import FedGMA
from lightning_fed.aggregators.fednova import FedNova
from lightning_fed.aggregators.robust import (
    CoordinateMedian,
    GeometricMedian,
    Krum,
    MultiKrum,
    RobustMean,
    TrimmedMean,
)
from lightning_fed.aggregators.server_optimizer import ServerOptimizer
from lightning_fed.aggregators.stateful import StatefulAggregator

__all__ = [
    "Aggregator",
    "CGW",
    "CoordinateMedian",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedDynServer",
    "FedGMA",
    "FedNova",
    "FedYogi",
    "GeometricMedian",
    "Krum",
    "MultiKrum",
    "RobustMean",
    "ServerOptimizer",
    "StatefulAggregator",
    "TrimmedMean",
]
