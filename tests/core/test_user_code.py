"""What is found by reading the user's own code."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fed.core.user_code import is_own, own_places, own_uses
from tests.data.partitioners import parts as others
from tests.parts import BySizes

STEPS: list[int] = []


def helper() -> None:
    STEPS.append(1)


@functools.lru_cache
def cached() -> None:
    helper()


class Base(nn.Module):
    scale = 2.0

    @property
    def early(self) -> Any:
        return self.first

    @staticmethod
    def fixed() -> Any:
        return STEPS.count

    def unused(self) -> None:
        print(self.never)


def by_function(self: Any) -> None:
    helper()


def by_decorator(self: Any) -> None:
    cached()


def by_property(self: Any) -> Any:
    return self.early


def by_static_method(self: Any) -> Any:
    return self.fixed()


def by_comprehension(self: Any) -> Any:
    return [helper() for _ in range(2)]


def by_inner_function(self: Any) -> Any:
    def inner() -> Any:
        return self.first

    return inner()


USES = {
    by_function: "append", by_decorator: "append", by_property: "first", by_static_method: "count",
    by_comprehension: "append", by_inner_function: "first",
}  # fmt: skip


@pytest.mark.parametrize("body", USES)
def test_what_own_code_comes_to_is_found(body: Callable[[Any], Any]) -> None:
    part = type("Own", (nn.Module,), {**{k: v for k, v in vars(Base).items() if k in KEPT}, "forward": body})
    assert own_uses([nn.Sequential(part())], {USES[body]})


# What a class with one of the functions above must have for it.
KEPT = ("early", "fixed", "__module__")


def test_the_first_name_that_is_used_is_told_with_its_place() -> None:
    assert own_uses([Base()], {"never"}) == ("never", "Base.unused")
    assert own_uses([Base()], {"first", "never", "other"}) == ("first", "Base.early")
    assert own_uses([Base()], {"other"}) is None
    assert own_uses([nn.Linear(2, 2)], {"weight"}) is None


def test_own_code_keeps_global_variables_in_its_modules_and_in_those_that_it_takes_functions_from() -> None:
    places = own_places(nn.Sequential(Base(), nn.Linear(2, 2)))
    assert Base in places
    assert sys.modules[__name__] in places
    assert sys.modules[BySizes.__module__] in places
    assert others not in places, "nothing here comes from there"
    assert nn.Module not in places
    assert torch not in places
    assert own_places(nn.Linear(2, 2)) == []


def test_what_is_the_users_own() -> None:
    assert is_own(Base)
    assert is_own(helper)
    assert not is_own(nn.Linear)
    assert not is_own(functools.partial)
