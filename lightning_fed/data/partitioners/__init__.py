"""Partitioners: which client owns which training sample, as pure functions of (targets or users, seed)."""

from lightning_fed.data.partitioners.base import Partitioner
from lightning_fed.data.partitioners.classes import ExactClasses, Shards
from lightning_fed.data.partitioners.dirichlet import DirichletBalanced, DirichletByClass, DirichletByClient
from lightning_fed.data.partitioners.quantity import IID, ByUser, PowerLaw, QuantityDirichlet

__all__ = [
    "IID", "ByUser", "DirichletBalanced", "DirichletByClass", "DirichletByClient", "ExactClasses", "Partitioner",
    "PowerLaw", "QuantityDirichlet", "Shards",
]  # fmt: skip
