"""Who takes part in a round, and how much each does."""

from lightning_fed.sampling.samplers import ClientSampler, UniformSampler, WeightedSampler, cohort_size

__all__ = ["ClientSampler", "UniformSampler", "WeightedSampler", "cohort_size"]

for _kind in (ClientSampler, UniformSampler, WeightedSampler):
    _kind.__module__ = __name__  # as saved runs name them
