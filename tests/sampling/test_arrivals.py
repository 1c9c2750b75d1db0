"""Arrivals against a clock of their own: who trains, from when to when, and from which model."""

from typing import Any

import numpy as np
import pytest

from lightning_fed.core.seeding import Purpose, numpy_generator_for
from lightning_fed.errors import FederatedError
from lightning_fed.sampling import Arrivals, CohortDraw, Stragglers

SIZES = np.array([8, 0, 16, 24, 8, 8, 3, 9, 20, 1, 7, 30])
N = np.count_nonzero(SIZES)


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
