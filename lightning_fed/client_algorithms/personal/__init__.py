"""Personalised federated learning: what of a model is a client's own."""

from lightning_fed.client_algorithms.personal.own_models import APFL, Ditto, LocalOnly, PFedMe
from lightning_fed.client_algorithms.personal.per_fedavg import PerFedAvg

__all__ = ["APFL", "Ditto", "LocalOnly", "PFedMe", "PerFedAvg"]
