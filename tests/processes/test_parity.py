"""Two processes find what one finds, and each of the two the same, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Pair, run_pair
from process_cases import CASES, EVERYTHING, compose
from torch import Tensor

DOUBLE, SINGLE = 1e-10, 1e-5
APART = ("taped", "begun", "too many diverged", "one diverged")  # see test_rounds.py
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


@pytest.mark.slow
def test_every_combination(tmp_path: Path) -> None:
    found = run_pair(tmp_path, "everything")
    worst = {}
    for client, rule, mask in EVERYTHING:
        name = f"{client} | {rule} | {mask}"
        assert same(found[0][name], found[1][name]), name
        worst[name] = distance(compose(1, tmp_path, client, rule, mask), found[0][name])
    assert {name: far for name, far in worst.items() if not far < DOUBLE} == {}
