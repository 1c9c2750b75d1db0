"""Which process trains which client."""

from itertools import product

import numpy as np
import pytest

from lightning_fed.core.updates import Client
from lightning_fed.distributed.assignment import Trained, assign_clients, smooth_speeds


def clients(*sizes: int) -> list[Client]:
    return [Client(i, size, 1) for i, size in enumerate(sizes)]


def ids(shares: list[tuple[Client, ...]]) -> list[list[int]]:
    return [[client.id for client in share] for share in shares]


def test_the_largest_goes_to_the_least_loaded() -> None:
    assert ids(assign_clients(clients(5, 30, 20, 11, 4), 2)) == [[0, 1], [2, 3, 4]]
    assert ids(assign_clients(clients(8, 8, 8, 8), 2)) == [[0, 2], [1, 3]]
    assert ids(assign_clients(clients(7), 3)) == [[0], [], []]


def test_where_all_take_as_many_steps_a_large_client_is_no_more_work() -> None:
    assert ids(assign_clients(clients(100, 10, 10, 10), 2)) == [[0], [1, 2, 3]]
    assert ids(assign_clients(clients(100, 10, 10, 10), 2, most=10)) == [[0, 2], [1, 3]]


def test_a_slower_process_gets_less() -> None:
    """By hand: client 0 is done after 6 of 1 or 12 of 1/2, client 1 after 11 or 10, client 2 after 9 or 16, ..."""
    assert ids(assign_clients(clients(6, 5, 3, 2), 2, speeds=[1.0, 0.5])) == [[0, 2, 3], [1]]
    assert ids(assign_clients(clients(8, 8, 8, 8, 8), 2, speeds=[4.0, 1.0])) == [[0, 1, 2, 3], [4]]
    assert ids(assign_clients(clients(8, 8), 2, speeds=[1.0, 9.0])) == [[], [0, 1]]
    assert ids(assign_clients(clients(100, 10, 10, 10), 2, most=10, speeds=[3.0, 1.0])) == [[0, 1, 2], [3]]


def test_equal_speeds_change_nothing() -> None:
    rng = np.random.default_rng(0)
    for size in (2, 3, 7):
        some = clients(*rng.integers(1, 20, 40).tolist())
        assert assign_clients(some, size, speeds=[3.7] * size) == assign_clients(some, size)


@pytest.mark.parametrize("size", [2, 3])
def test_the_last_is_done_within_the_bound_of_the_best_division(size: int) -> None:
    """Against every division there is; and the rule is not far from the best one on average."""
    rng, ratios = np.random.default_rng(size), []
    for _ in range(40):
        sizes, speeds = rng.integers(1, 30, 6), rng.uniform(0.2, 3.0, size)
        given = assign_clients(clients(*sizes.tolist()), size, speeds=speeds.tolist())
        assert sorted(client.id for share in given for client in share) == list(range(6))
        took = max(sum(c.num_samples for c in share) / v for share, v in zip(given, speeds, strict=True))
        ends = [
            [sizes[np.array(to) == r].sum() / speeds[r] for r in range(size)] for to in product(range(size), repeat=6)
        ]
        ratios.append(took / np.max(ends, axis=1).min())
    assert 1 - 1e-12 <= min(ratios) <= max(ratios) <= 2 * size / (size + 1)
    assert np.mean(ratios) < 1.05


def test_speeds_follow_what_processes_show() -> None:
    assert smooth_speeds(None, [Trained(False, 0, 0.0), Trained(False, 0, 0.1)]) is None
    first = smooth_speeds(None, [Trained(False, 10, 2.0), Trained(True, 30, 3.0), Trained(False, 0, 0.0)])
    assert first == [5.0, 10.0, 10.0]  # nothing is known of the last one, which is tried
    assert smooth_speeds(first, [Trained(False, 10, 10.0), Trained(False, 28, 2.0), Trained(False, 4, 1.0)]) == [
        3,
        12,
        7,
    ]


def test_a_process_that_was_slow_once_is_tried_again() -> None:
    speeds, some = smooth_speeds(None, [Trained(False, 16, 1.0), Trained(False, 16, 1000.0)]), clients(16, 16)
    trials = 0
    while not assign_clients(some, 2, speeds=speeds)[1]:
        speeds = smooth_speeds(speeds, [Trained(False, 32, 2.0), Trained(False, 0, 0.0)])
        trials += 1
    assert 3 < trials < 10
