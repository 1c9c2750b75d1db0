"""Which process trains which client."""

from itertools import product

import numpy as np
import pytest

from lightning_fed.core.updates import Client
from lightning_fed.distributed.sharing import assign_clients


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


@pytest.mark.parametrize("size", [2, 3])
def test_the_last_is_done_within_the_bound_of_the_best_division(size: int) -> None:
    """Against every division there is; and the rule is not far from the best one on average."""
    rng, ratios = np.random.default_rng(size), []
    for _ in range(40):
        sizes = rng.integers(1, 30, 6)
        given = assign_clients(clients(*sizes.tolist()), size)
        assert sorted(client.id for share in given for client in share) == list(range(6))
        busiest = max(sum(client.num_samples for client in share) for share in given)
        loads = [[sizes[np.array(to) == rank].sum() for rank in range(size)] for to in product(range(size), repeat=6)]
        ratios.append(busiest / np.max(loads, axis=1).min())
    assert 1 <= min(ratios) <= max(ratios) <= 4 / 3
    assert np.mean(ratios) < 1.05
