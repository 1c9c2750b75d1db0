"""What is found by reading the user's own code."""

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fed.engines.vectorized.own_code import OwnCode, is_of_python, is_own

STEPS: list[int] = []
count = 0


def helper() -> None:
    STEPS.append(1)


def adds() -> None:
    global count
    count += 1


def imports() -> None:
    import json

    json.dumps({})


def sleeps() -> None:
    time.sleep(0)


@functools.lru_cache
def cached() -> None:
    STEPS.append(1)


def wrapped(function: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(function)
    def inner() -> None:
        function()

    return inner


class Made:
    """Is made by a function that is read."""

    def __init__(self) -> None:
        helper()


class Holds:
    """What a module keeps that is no module."""

    @property
    def value(self) -> None:
        return helper()

    @functools.cached_property
    def kept(self) -> None:
        return helper()

    @staticmethod
    def alone() -> None:
        helper()


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.holds, self.call, self.tensor = Holds(), functools.partial(wrapped(helper)), torch.zeros(1)

    def unused(self) -> None:
        helper()


def reading(body: Callable[[Any], Any]) -> OwnCode:
    return OwnCode([nn.Sequential(type("Own", (Base,), {"forward": body, "__module__": __name__})())], ("forward",))


REACHED: dict[str, Callable[[Any], Any]] = {
    "function": lambda self: helper(),
    "nested": lambda self: [helper() for _ in range(2)],
    "decorated": lambda self: wrapped(helper),
    "cached": lambda self: cached(),
    "made": lambda self: Made(),
    "method of a superclass": lambda self: self.unused(),
    "attribute": lambda self: self.call(),
    "property": lambda self: self.holds.value,
    "cached property": lambda self: self.holds.kept,
    "static": lambda self: self.holds.alone(),
}


@pytest.mark.parametrize("name", REACHED)
def test_what_a_method_calls_is_read(name: str) -> None:
    code = reading(REACHED[name])
    assert set(code.shared) == {"STEPS"}
    found = code.uses({"append"})
    assert found is not None
    assert found[0] == "append"


def test_what_it_does_not_call_is_not_read_unless_all_is() -> None:
    assert not reading(lambda self: None).names.get("append")
    assert OwnCode([Base()]).names["append"] == "helper"


@pytest.mark.parametrize(
    ("body", "kind", "name"),
    [
        (lambda self: adds(), "changes", "count"),
        (lambda self: imports(), "unknown", "json"),
        (lambda self: sleeps(), "unknown", "time"),
        (lambda self: self.tensor, "shared", "tensor"),
    ],
)
def test_what_it_finds_is_named(body: Any, kind: str, name: str) -> None:
    assert list(getattr(reading(body), kind)) == [name]


def test_whose_code_is_whose() -> None:
    assert is_own(Base)
    assert not is_own(nn.Linear)
    assert is_own(time)
    assert is_of_python(time)
    assert not is_of_python(Base)
