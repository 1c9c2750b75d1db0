"""Who is drawn, and who arrives."""

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fed.core.seeding import Purpose, numpy_generator_for
from lightning_fed.errors import FederatedError
from lightning_fed.sampling import (
    Arrivals,
    ClientSampler,
    CohortDraw,
    PoissonSampler,
    Stragglers,
    UniformSampler,
    WeightedSampler,
    cohort_size,
)

ROUNDS = 4000
# Each frequency test rejects a right sampler with this probability; the streams are fixed, so a pass stays a pass.
ERROR_RATE = 1e-4
# Quantiles of the chi-square distribution at 1 - 1e-4, by degrees of freedom (R: qchisq(1 - 1e-4, k)).
CRITICAL = {5: 25.745, 9: 33.720, 14: 42.579, 15: 44.263}

SIZES = np.array([8, 0, 16, 24, 8, 8, 3, 9, 20, 1, 7, 30])
N = np.count_nonzero(SIZES)


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


def steps(at_once: int, count: int, spread: float = 1.0, rounds: int = 60, seed: int = 3) -> list[Any]:
    rule = Arrivals(at_once, spread)
    return [rule.arrived(round, count, SIZES, seed) for round in range(1, rounds + 1)]


@pytest.mark.parametrize(("at_once", "count"), [(5, 2), (2, 5), (7, 1), (11, 11), (1, 3), (11, 4)])
def test_every_client_trains_for_its_time_from_the_newest_model(at_once: int, count: int) -> None:
    found = steps(at_once, count)
    times = np.exp(numpy_generator_for(3, Purpose.SPEED).standard_normal(len(SIZES)))
    clock = np.cumsum([0.0, *(seconds for _, _, seconds in found)])  # when version v came to be
    for round, (arrived, later, _) in enumerate(found, 1):
        assert len(arrived) == count
        assert all(SIZES[client] for client in arrived)
        for client, version in arrived.items():
            earliest = clock[version] + times[client]
            latest = clock[version + 1] + times[client] if version + 1 < round else clock[round]
            assert clock[round - 1] - 1e-9 <= latest
            assert earliest <= clock[round] + 1e-9
        assert max(later, default=0) < round
        following = found[round][0].values() if found[round:] else ()
        assert {version for version in following if version < round} <= later


def test_as_many_train_as_are_asked_for() -> None:
    """If all train and all are waited for nobody is late; of 11 alike each misses what the 10 others send meanwhile."""
    times = np.exp(numpy_generator_for(3, Purpose.SPEED).standard_normal(len(SIZES)))[SIZES > 0]
    for arrived, later, seconds in steps(11, 11):
        assert (len(set(arrived.values())), later, seconds) == (1, set(), pytest.approx(times.max()))
    for at_once, spread, missed in ((11, 0.0, 10), (1, 1.0, 0)):
        found = enumerate(steps(at_once, 1, spread))
        late = [at - version for at, (arrived, *_) in found for version in arrived.values()]
        assert set(late[20:]) == {missed}


def test_the_plan_depends_on_the_seed_alone() -> None:
    assert steps(5, 2) == steps(5, 2, rounds=60)
    assert steps(5, 2)[:20] == steps(5, 2, rounds=20)
    assert steps(5, 2) != steps(5, 2, seed=4)
    rule = Arrivals(5, 1.0)
    backwards = [rule.arrived(round, 2, SIZES, 3) for round in range(60, 0, -1)]
    assert backwards[::-1] == steps(5, 2)


def test_a_cohort_is_who_arrives_and_has_its_time() -> None:
    rule, (arrived, _, seconds) = Arrivals(5, 1.0), steps(5, 4)[6]
    draw = CohortDraw(seed=3, sizes=SIZES, steps=SIZES, steps_per_epoch=SIZES, fewest=1, sampler=rule)
    cohort = draw.draw(7, 4)
    assert [client.id for client in cohort.clients] == sorted(arrived)
    assert (cohort.skipped, draw.seconds) == ((), seconds)
    assert len(draw.draw(1, 12).clients) == N, "who has no samples never trains"


def test_a_client_is_as_fast_as_under_stragglers() -> None:
    arrived, _, seconds = steps(1, 1)[0]
    (client,) = arrived
    assert seconds == pytest.approx(Stragglers(spread=1.0).step_times(len(SIZES), 3)[client])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Arrivals(0), "at_once` to be an integer of at least 1, got 0"),
        (lambda: Arrivals(5, -1.0), "spread` to be "),
        (lambda: steps(12, 2), "at_once` to be at most the 11 clients, got 12"),
        (
            lambda: Arrivals(2).sample_available(1, 2, SIZES, SIZES > 0, 3),
            "Expected no `--trainer.participation.availability` with Arrivals",
        ),
    ],
)
def test_mistakes_are_one_sentence(call: Any, words: str) -> None:
    with pytest.raises(FederatedError, match=words):
        call()
