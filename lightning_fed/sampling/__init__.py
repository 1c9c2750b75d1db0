"""Who takes part in a round, and how much work each client does."""

from lightning_fed.sampling.availability import (
    Availability,
    BernoulliAvailability,
    PeriodicAvailability,
    TraceAvailability,
)
from lightning_fed.sampling.cohorts import CohortDraw, Participation
from lightning_fed.sampling.samplers import (
    Arrivals,
    ClientSampler,
    PoissonSampler,
    UniformSampler,
    WeightedSampler,
    cohort_size,
)
from lightning_fed.sampling.work import ClientWork, Stragglers, UnequalWork

__all__ = [
    "Arrivals", "Availability", "BernoulliAvailability", "ClientSampler", "ClientWork", "CohortDraw",
    "Participation", "PeriodicAvailability", "PoissonSampler", "Stragglers", "TraceAvailability", "UnequalWork",
    "UniformSampler", "WeightedSampler", "cohort_size",
]  # fmt: skip
