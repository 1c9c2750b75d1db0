"""Cohorts: pure functions of seed and round, drawn with the stated probabilities."""

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fed.errors import FederatedError
from lightning_fed.sampling import ClientSampler, PoissonSampler, UniformSampler, WeightedSampler, cohort_size

ROUNDS = 4000
# Each frequency test rejects a right sampler with this probability; the streams are fixed, so a pass stays a pass.
ERROR_RATE = 1e-4
# Quantiles of the chi-square distribution at 1 - 1e-4, by degrees of freedom (R: qchisq(1 - 1e-4, k)).
CRITICAL = {5: 25.745, 9: 33.720, 14: 42.579, 15: 44.263}


def chi_square(counts: dict[Any, int], expected: dict[Any, float]) -> float:
    assert set(counts) <= set(expected)
    total = sum(counts.values())
    return sum((counts.get(key, 0) - total * p) ** 2 / (total * p) for key, p in expected.items())


@pytest.mark.parametrize("sampler", [UniformSampler(), WeightedSampler(), WeightedSampler([1.0] * 20)])
@given(seed=st.integers(0, 2**40), round=st.integers(1, 10**6), count=st.integers(1, 20))
@settings(deadline=None, max_examples=50)
def test_cohorts_are_distinct_ids_and_a_pure_function_of_seed_and_round(
    sampler: ClientSampler, seed: int, round: int, count: int
) -> None:
    sizes = np.arange(1, 21)
    first = sampler.sample(round, count, sizes, seed)
    np.random.seed(seed % 2**32)
    sampler.sample(round + 1, count, sizes, seed)
    assert np.array_equal(first, sampler.sample(round, count, sizes, seed))
    assert len(set(first.tolist())) == count
    assert first.min() >= 0
    assert first.max() < 20
    assert np.array_equal(sizes, np.arange(1, 21))


@pytest.mark.parametrize("sampler", [UniformSampler(), WeightedSampler()])
def test_rounds_and_seeds_draw_different_cohorts(sampler: ClientSampler) -> None:
    sizes = np.full(1000, 10)
    cohorts = {tuple(sorted(sampler.sample(r, 10, sizes, s).tolist())) for r in range(1, 21) for s in range(5)}
    assert len(cohorts) == 100


def test_every_client_is_as_likely_in_a_uniform_cohort() -> None:
    """Also every pair: 15 sets of 2 out of 6."""
    drawn = [tuple(sorted(UniformSampler().sample(r, 2, np.arange(6), 0).tolist())) for r in range(ROUNDS)]
    pairs = list(itertools.combinations(range(6), 2))
    assert chi_square(Counter(drawn), dict.fromkeys(pairs, 1 / 15)) < CRITICAL[14]


def test_a_client_takes_part_by_itself_in_a_poisson_cohort() -> None:
    """Every set of 4 clients with the product of their probabilities, the empty one too."""
    drawn = [tuple(PoissonSampler().sample(r, 1, np.array([9, 1, 0, 4]), 0).tolist()) for r in range(ROUNDS)]
    sets = [each for size in range(5) for each in itertools.combinations(range(4), size)]
    counts = Counter(drawn)
    assert chi_square(counts, {each: 0.25 ** len(each) * 0.75 ** (4 - len(each)) for each in sets}) < CRITICAL[15]
    assert counts[()] > 0
    assert PoissonSampler().sample(1, 4, np.ones(4), 0).tolist() == [0, 1, 2, 3]
    again = [tuple(PoissonSampler().sample(r, 1, np.ones(4), 0).tolist()) for r in range(ROUNDS)]
    assert drawn == again
    assert drawn != [tuple(PoissonSampler().sample(r, 1, np.ones(4), 1).tolist()) for r in range(ROUNDS)]


def test_uniform_takes_no_account_of_sizes() -> None:
    sizes = np.array([1000, 1, 1, 0, 1, 1, 1, 1, 1, 1])
    firsts = Counter(int(UniformSampler().sample(r, 1, sizes, 1)[0]) for r in range(ROUNDS))
    assert chi_square(firsts, dict.fromkeys(range(10), 0.1)) < CRITICAL[9]


@pytest.mark.parametrize("given_weights", [True, False], ids=["weights", "sizes"])
def test_weighted_draws_follow_the_weights(given_weights: bool) -> None:
    weights = np.array([1, 2, 3, 4, 5, 6])
    sampler = WeightedSampler([0.5 * w for w in weights]) if given_weights else WeightedSampler()
    sizes = np.full(6, 7) if given_weights else weights
    drawn = Counter(int(sampler.sample(r, 1, sizes, 2)[0]) for r in range(ROUNDS))
    assert chi_square(drawn, {i: w / 21 for i, w in enumerate(weights)}) < CRITICAL[5]


def test_weighted_cohorts_are_drawn_one_after_another_without_replacement() -> None:
    """P({a, b}) = p_a p_b / (1 - p_a) + p_b p_a / (1 - p_b)."""
    p = np.array([1, 2, 3, 4, 5, 6]) / 21
    expected = {(a, b): p[a] * p[b] * (1 / (1 - p[a]) + 1 / (1 - p[b])) for a, b in itertools.combinations(range(6), 2)}
    assert math.isclose(sum(expected.values()), 1)
    sampler = WeightedSampler(list(p))
    drawn = Counter(tuple(sorted(sampler.sample(r, 2, np.ones(6), 3).tolist())) for r in range(ROUNDS))
    assert chi_square(drawn, expected) < CRITICAL[14]
    assert chi_square(drawn, dict.fromkeys(expected, 1 / 15)) > CRITICAL[14], "the test must see the weights"


def test_clients_of_weight_zero_are_never_drawn() -> None:
    sizes = np.array([0, 3, 0, 1])
    for round in range(50):
        assert sorted(WeightedSampler().sample(round, 2, sizes, 0).tolist()) == [1, 3]


@pytest.mark.parametrize("weights", [[1.0, -1.0], [float("nan")], [float("inf")]])
def test_bad_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(FederatedError, match=r"--trainer\.participation\.sampler\.weights"):
        WeightedSampler(weights)


def test_too_few_weights_are_refused() -> None:
    with pytest.raises(FederatedError, match=r"--trainer\.participation\.sampler\.weights.* 3 clients, got 2"):
        WeightedSampler([1.0, 2.0]).sample(1, 1, np.ones(3), 0)
    with pytest.raises(FederatedError, match=r"at least 2 clients .* got 1: .*--trainer\.clients_per_round"):
        WeightedSampler([0.0, 2.0, 0.0]).sample(1, 2, np.ones(3), 0)


@pytest.mark.parametrize(
    ("clients_per_round", "num_clients", "expected"),
    [
        (1, 10, 1), (10, 10, 10), (1.0, 10, 10), (0.1, 100, 10), (0.29, 100, 29), (0.001, 100, 1), (0.5, 1, 1),
        (0.34, 10, 3), (0.36, 10, 4), (0.999, 100, 100),
    ],
)  # fmt: skip
def test_counts_and_fractions(clients_per_round: int | float, num_clients: int, expected: int) -> None:
    size = cohort_size(clients_per_round, num_clients)
    assert (size, type(size)) == (expected, int)


def test_more_clients_than_there_are_is_refused() -> None:
    with pytest.raises(FederatedError, match=r"--trainer\.clients_per_round.*\(10\), got 11.*--data\.num_clients"):
        cohort_size(11, 10)
