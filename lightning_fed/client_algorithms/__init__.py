"""Client-side callbacks: what a client does differently in its local training."""

from lightning_fed.client_algorithms.attacks import ALIE, IPM, Attack, GaussianNoise, LabelFlip, SignFlip
from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.client_algorithms.dpsgd import DPSGD
from lightning_fed.client_algorithms.feddyn import FedDyn
from lightning_fed.client_algorithms.fedga import FedGA, GradAlign, LinearScaling
from lightning_fed.client_algorithms.fedprox import FedProx
from lightning_fed.client_algorithms.losses import (
    MOON,
    FedIIR,
    FedLC,
    FedNTD,
    FedRS,
    LogitAdjustment,
    LossAlgorithm,
)  # fmt: skip
from lightning_fed.client_algorithms.own_models import APFL, Ditto, LocalOnly, PerFedAvg, PFedMe
from lightning_fed.client_algorithms.personal_parameters import FedBN, FedPer, FedRep, LGFedAvg, PersonalParameters
from lightning_fed.client_algorithms.sam import DeltaSGD, FedSAM
from lightning_fed.client_algorithms.scaffold import SCAFFOLD, StatelessSCAFFOLD
from lightning_fed.client_algorithms.server_direction import FedCM, FedGaLA, FedLESAM, MimeLite
from lightning_fed.client_algorithms.stale import Stale

__all__ = [
    "ALIE", "APFL", "DPSGD", "IPM", "MOON", "SCAFFOLD", "Attack", "ClientAlgorithm", "DeltaSGD", "Ditto", "FedBN",
    "FedCM", "FedDyn", "FedGA", "FedGaLA", "FedIIR", "FedLC", "FedLESAM", "FedNTD", "FedPer", "FedProx", "FedRS",
    "FedSAM", "FedRep", "GaussianNoise", "GradAlign", "LGFedAvg", "LabelFlip", "LinearScaling", "LocalOnly",
    "LogitAdjustment", "LossAlgorithm", "MimeLite", "PFedMe", "PerFedAvg", "PersonalParameters", "SignFlip", "Stale",
    "StatelessSCAFFOLD",
]  # fmt: skip
