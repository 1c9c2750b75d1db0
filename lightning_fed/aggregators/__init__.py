"""Server-side callbacks: each steps the global model at the end of a round."""

from lightning_fed.aggregators.adaptive import FedAdagrad, FedAdam, FedYogi
from lightning_fed.aggregators.base import Aggregator, StatefulAggregator
from lightning_fed.aggregators.cgw import CGW
from lightning_fed.aggregators.conflicts import (
    TIES,
    CombiningAggregator,
    FedAWA,
    FedFV,
    FedGaLAServer,
    FedMGDA,
    FedOMG,
    PCGrad,
    SignMajority,
)
from lightning_fed.aggregators.fairness import AFL, TERM, LossWeightingAggregator, QFedAvg
from lightning_fed.aggregators.fedavg import FedAvg, FedLWS, FedNova
from lightning_fed.aggregators.fedavgm import FedACG, FedAvgM
from lightning_fed.aggregators.feddg_ga import FedDGGA
from lightning_fed.aggregators.feddyn import FedDynServer
from lightning_fed.aggregators.fedexp import FedExP
from lightning_fed.aggregators.fedgma import FedGMA
from lightning_fed.aggregators.robust import (
    Bulyan,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    MultiKrum,
    RobustMean,
    TrimmedMean,
)
from lightning_fed.aggregators.torch_optimizer import ServerOptimizer

__all__ = [
    "AFL", "Aggregator", "Bulyan", "CGW", "CombiningAggregator", "CoordinateMedian", "FedACG", "FedAWA",
    "FedAdagrad", "FedAdam", "FedAvg", "FedAvgM", "FedDGGA", "FedDynServer", "FedExP", "FedFV", "FedGMA",
    "FedGaLAServer", "FedLWS", "FedMGDA", "FedNova", "FedOMG", "FedYogi", "GeometricMedian", "Krum",
    "LossWeightingAggregator", "MultiKrum", "PCGrad", "QFedAvg", "RobustMean", "ServerOptimizer", "SignMajority",
    "StatefulAggregator", "TERM", "TIES", "TrimmedMean",
]  # fmt: skip
