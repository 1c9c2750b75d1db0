"""Personalised federated learning: what of a model is a client's own."""

from lightning_fed.client_algorithms.personal.own_models import APFL, Ditto, LocalOnly, PerFedAvg, PFedMe
from lightning_fed.client_algorithms.personal.parameters import (
    FedBN,
    FedPer,
    FedRep,
    LGFedAvg,
    PersonalParameters,
    personal_parameters,
)

__all__ = [
    "APFL", "Ditto", "FedBN", "FedPer", "FedRep", "LGFedAvg", "LocalOnly", "PFedMe", "PerFedAvg", "PersonalParameters",
    "personal_parameters",
]  # fmt: skip
