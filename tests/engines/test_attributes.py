"""What a module and the user's own code around it hold, compared and put back."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_fed.engines.attributes import Attributes, parts_of


class Large(list[int]):
    """Refuses to be copied."""

    def copy(self) -> Any:
        raise AssertionError


class Holds:
    """No module."""

    def __init__(self) -> None:
        self.inner: dict[str, Any] = {"deep": [1, (2, [3])]}


class Part(nn.Module):
    shared: list[int] = []

    def __init__(self) -> None:
        super().__init__()
        self.count, self.mean, self.names, self.holds = 300, float("nan"), {"a"}, Holds()
        self.stream = torch.Generator()


ROWS, ARRAY, FIGURE = Large(range(20_000)), np.zeros(3), 1.5
HERE = sys.modules[__name__]
PLACES = (Part, Holds, HERE)


CHANGES: dict[str, Callable[[Part], Any]] = {
    "count": lambda part: setattr(part, "count", 301),
    "names": lambda part: part.names.add("b"),
    "shared": lambda part: part.shared.append(1),
    "holds": lambda part: part.holds.inner["deep"][1][1].append(4),
    "stream": lambda part: torch.rand(1, generator=part.stream),
    "ARRAY": lambda part: ARRAY.__setitem__(0, 1.0),
    "FIGURE": lambda part: setattr(HERE, "FIGURE", 2.5),
    "NEW": lambda part: setattr(HERE, "NEW", 1),
    "newer": lambda part: setattr(Part, "newer", 1),
    "mean": lambda part: delattr(part, "mean"),
}


def test_parts_are_those_that_modules_yields() -> None:
    twice = nn.Linear(2, 2)
    inner = nn.Sequential(twice, nn.ModuleList([Part(), nn.BatchNorm1d(2)]))
    inner.register_module("none", None)
    module = nn.Sequential(inner, twice, nn.Sequential(inner, Part()))
    assert list(map(id, parts_of(module))) == list(map(id, module.modules()))


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_and_put_back(name: str) -> None:
    part = Part()
    before = Attributes(nn.Sequential(part), PLACES)
    CHANGES[name](part)
    assert before.shared() == name
    before.put_back()
    assert before.shared() is None


def test_numbers_of_the_same_value_are_the_same() -> None:
    part = Part()
    before = Attributes(part, PLACES)
    part.count, part.mean = int("300"), float("nan")
    assert list(before.changes()) == []


def test_lists_may_grow_where_they_wait_for_a_rounds_end() -> None:
    part = Part()
    before = Attributes(part, PLACES)
    part.holds.inner["deep"].append(5)
    assert list(before.changes(may_grow=True)) == []
    part.holds.inner["deep"][0] = 7
    del part.holds.inner["deep"][1:]
    assert list(before.changes(may_grow=True)) == [(part, "holds")]


def test_what_torch_keeps_in_its_own_parts_is_not_shared() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    before = Attributes(net, ())
    net[0].training = False
    assert list(before.changes()) == [(net[0], "training")]
    assert before.shared() is None
