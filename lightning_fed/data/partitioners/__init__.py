"""Partitioners: which client owns which training sample, as pure functions of (targets or users, seed)."""

from lightning_fed.data.partitioners.base import Partitioner
from lightning_fed.data.partitioners.counts import IID, ByUser, ExactClasses, PowerLaw, QuantityDirichlet, Shards
from lightning_fed.data.partitioners.dirichlet import DirichletBalanced, DirichletByClass, DirichletByClient

__all__ = [
    "IID", "ByUser", "DirichletBalanced", "DirichletByClass", "DirichletByClient", "ExactClasses", "Partitioner",
    "PowerLaw", "QuantityDirichlet", "Shards",
]  # fmt: skip
