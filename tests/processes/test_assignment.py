"""Which process trains which client."""

from lightning_fed.assignment import assign_clients
from lightning_fed.hooks import Client


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
