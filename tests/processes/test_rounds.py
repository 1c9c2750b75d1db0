"""Who trains whom in two processes, what clients keep there, and how mistakes end."""

from pathlib import Path

import pytest
import torch
from conftest import Pair
from process_cases import CASES, MISTAKES, kept
from test_parity import DOUBLE, distance, same

from lightning_fed.assignment import assign_clients
from lightning_fed.errors import FederatedError
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


def test_processes_train_disjoint_clients_on_the_batches_of_one(pair: Pair) -> None:
    alone, (first, second) = pair.alone("taped"), (found["taped"] for found in pair.everyone)
    assert first["cohorts"] == second["cohorts"] == alone["cohorts"]
    trained = [set(each["own"]) for each in (first, second)]
    drawn = {(at, client) for at, cohort in enumerate(alone["cohorts"], 1) for client in cohort}
    assert trained[0].isdisjoint(trained[1])
    assert trained[0] | trained[1] == drawn == set(alone["own"])
    assert min(map(len, trained)) >= 3
    for key, batches in {**first["own"], **second["own"]}.items():
        assert same(batches, alone["own"][key])


def test_clients_were_trained_by_both(pair: Pair) -> None:
    """Otherwise nothing of what they keep would have been handed over."""
    own = [found["taped"]["own"] for found in pair.everyone]
    assert {client for _, client in own[0]} & {client for _, client in own[1]}


def test_a_run_of_two_processes_goes_on_in_one(pair: Pair) -> None:
    went_on = kept(1, pair.folder, where="disk", rounds=6, at="begun", resume=True)
    assert distance(pair.alone("kept device"), went_on) < DOUBLE


def test_a_run_of_one_process_goes_on_in_two(pair: Pair) -> None:
    first, second = (found["continued"] for found in pair.everyone)
    assert same(first, second)
    assert distance(pair.alone("kept device"), first) < DOUBLE


@pytest.mark.parametrize("name", ["too many diverged", "one diverged"])
def test_clients_that_diverge_are_counted_over_all_processes(pair: Pair, name: str) -> None:
    with pytest.raises(FederatedError) as alone:
        CASES[name](1, pair.folder)
    for found in pair.everyone:
        assert found[name]["error"].partition(": ")[2] == str(alone.value)


ENDS = {
    "fails on one": "Expected nothing, got a failure.",
    "fails between clients": "Expected nothing, got a failure.",
    "fails on the first": "Expected nothing, got a failure.",
    "defect on one": "Process 1 ended with ZeroDivisionError: division by zero",
    "sums in a client's hook": "only in hooks that are called once in a round",
    "rows in a client's hook": "only in hooks that are called once in a round",
    "sums on one": "they differ: round, reduce_sum: a hook must not depend on the rank",
    "another model": "Expected all processes to hold the same global model after round 2",
    "another split": "Expected every process to make the same clients of the same data",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_mistake_ends_all_processes_with_one_sentence(pair: Pair, name: str) -> None:
    first, second = (found[name]["error"].partition(": ")[2] for found in pair.everyone)
    assert ENDS[name] in first
    assert first == second or name == "defect on one"


def test_every_mistake_is_looked_at() -> None:
    assert set(ENDS) | {"continued"} == set(MISTAKES)
