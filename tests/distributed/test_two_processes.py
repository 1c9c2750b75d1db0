"""Two processes find what one finds, and each of the two the same, bit for bit; mistakes end both alike."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fed.errors import FederatedError
from tests.distributed.conftest import Pair, run_pair
from tests.distributed.process_cases import CASES, EVERYTHING, MISTAKES, compose, kept
from tests.parts import cover

pytestmark = pytest.mark.slow

DOUBLE, SINGLE = 1e-10, 1e-5
APART = ("taped", "uneven", "shuffled", "begun", "too many diverged", "one diverged", "too many failed")  # see below
APART += ("central privacy, secret",)
ALIKE = [name for name in CASES if name not in APART]


def distance(one: Any, other: Any, scale: float = 0.0) -> float:
    """The largest relative difference of two nested results; infinite if they are made differently."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return max([distance(one[key], other[key]) for key in one], default=0.0)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        return max(map(distance, one, other), default=0.0)
    if isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape:
        one, other = one.double(), other.double()
        return ((one - other).norm() / one.norm().clamp(min=1e-30)).item()
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return abs(one - other) / max(abs(one), 1e-30)
    return 0.0 if one == other else float("inf")


def same(one: Any, other: Any) -> bool:
    """Whether two nested results are equal, bit for bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.mark.parametrize("name", ALIKE)
def test_two_processes_find_what_one_finds(pair: Pair, name: str) -> None:
    first, second = (found[name] for found in pair.everyone)
    assert "error" not in first, first
    assert same(first, second)
    assert distance(pair.alone(name), first) < (SINGLE if name == "float32" else DOUBLE)


def test_the_cases_tell_apart(pair: Pair) -> None:
    """A comparison that everything passes would show nothing."""
    assert distance(pair.alone("none | FedAvg | none"), pair.everyone[0]["none | FedAvg | soft"]) > 1e-3
    assert distance(pair.alone("local steps"), pair.everyone[0]["schedule"]) > 1e-3
    assert not same(pair.alone("none | FedAvg | none"), pair.everyone[0]["none | FedAvg | soft"])


def test_payloads_at_their_limits_change_no_bit(pair: Pair) -> None:
    found = pair.everyone[0]
    assert torch.equal(found["payloads at their limits"]["weights"], found["clipped evenly"]["weights"])
    assert distance(found["payloads"]["weights"], found["clipped evenly"]["weights"]) > 1e-3


def test_noise_from_the_system_is_that_of_the_first_process(pair: Pair) -> None:
    first, second = (found["central privacy, secret"] for found in pair.everyone)
    assert same(first, second)
    assert distance(pair.alone("central privacy, secret")["weights"], first["weights"]) > 1e-3


def test_the_rate_was_lowered(pair: Pair) -> None:
    assert 0 < pair.alone("plateau")["logged"]["rate"] < 0.1


def test_every_sample_is_evaluated_once_however_it_is_drawn(pair: Pair) -> None:
    """In the batches of one process, with the numbers that its steps draw."""
    alone, everyone = pair.alone("shuffled"), [found["shuffled"] for found in pair.everyone]
    seen = [each.pop("own") for each in everyone]
    assert sorted(seen[0] + seen[1]) == sorted(alone["own"])
    for at in {(round, loader) for round, loader, _ in alone["own"]}:
        numbers = [number for each in seen for *place, batch in each if tuple(place) == at for number in batch]
        assert sorted(numbers) == list(range(37))
    assert len({tuple(batch) for _, loader, batch in alone["own"] if loader == 0}) == 15  # other ones in each round
    assert same(*everyone)
    assert distance({name: found for name, found in alone.items() if name != "own"}, everyone[0]) < DOUBLE


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


def test_matrices_have_the_rows_of_a_share(pair: Pair) -> None:
    """One in the process that gets the large client, five in that of the small ones."""
    alone, everyone = pair.alone("uneven"), [found["uneven"] for found in pair.everyone]
    assert [each.pop("own") for each in everyone] == [[1], [5]]
    assert alone["own"] == [6]
    assert same(*everyone)
    assert distance({name: found for name, found in alone.items() if name != "own"}, everyone[0]) < DOUBLE


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


def test_a_run_of_two_processes_goes_on_in_two_bit_for_bit(pair: Pair) -> None:
    for found in pair.everyone:
        assert same(found["resumed"], found["kept host"])


@pytest.mark.parametrize("rule", ["FedYogi", "ServerOptimizer"])
def test_a_run_on_unlike_processors_goes_on_bit_for_bit(pair: Pair, rule: str) -> None:
    for found in pair.everyone:
        assert same(found[f"unlike | {rule}, resumed"], found[f"unlike | {rule}"])


@pytest.mark.parametrize("name", ["too many diverged", "one diverged"])
def test_clients_that_diverge_are_counted_over_all_processes(pair: Pair, name: str) -> None:
    with pytest.raises(FederatedError) as alone:
        CASES[name](1, pair.folder)
    for found in pair.everyone:
        assert found[name]["error"].partition(": ")[2] == str(alone.value)


def test_clients_that_fail_are_counted_over_all_processes(pair: Pair) -> None:
    for found in pair.everyone:
        assert (
            "1 clients of a round to fail, but client 4 failed too in round 1 (ValueError: a bad"
            in (found["too many failed"]["error"])
        )


def test_the_processes_of_one_machine_meet_on_its_loopback_interface(pair: Pair) -> None:
    assert [found["listens"] for found in pair.everyone] == [["0100007F"]] * 2


ENDS = {
    "fails on one": "Expected nothing, got a failure.",
    "fails between clients": "Expected nothing, got a failure.",
    "fails on the first": "Expected nothing, got a failure.",
    "defect on one": "Process 1 ended with ZeroDivisionError: division by zero",
    "sums in a client's hook": "only in hooks that are called once in a round",
    "rows in a client's hook": "only in hooks that are called once in a round",
    "sums on one": "they differ: server step, reduce_sum: a hook must not depend on the rank",
    "another model": "Expected all processes to hold the same global model, and the same options of the local",
    "another rate": "and the same options of the local optimizer, after round 2, but they differ",
    "another split": "Expected every process to make the same clients of the same data",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_mistake_ends_all_processes_with_one_sentence(pair: Pair, name: str) -> None:
    first, second = (found[name]["error"].partition(": ")[2] for found in pair.everyone)
    assert ENDS[name] in first
    assert first == second or name == "defect on one"


def test_every_mistake_is_looked_at() -> None:
    assert set(ENDS) | {"continued", "resumed"} == set(MISTAKES)


@pytest.mark.pairs
def test_every_pair_of_parts(tmp_path: Path) -> None:
    found = run_pair(tmp_path, "everything")
    worst = {}
    for client, rule, mask in cover(EVERYTHING):
        name = f"{client} | {rule} | {mask}"
        assert same(found[0][name], found[1][name]), name
        worst[name] = distance(compose(1, tmp_path, client, rule, mask), found[0][name])
    assert {name: far for name, far in worst.items() if not far < DOUBLE} == {}
