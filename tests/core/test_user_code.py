"""What is found by reading the user's own code."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from lightning_fed.core.user_code import OwnCode, is_own

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


def reading(body: Callable[[Any], Any]) -> OwnCode:
    return OwnCode([nn.Sequential(type("Own", (Base,), {"forward": body, "__module__": __name__})())], ("forward",))


@pytest.mark.parametrize("body", USES)
def test_what_a_step_comes_to_is_found(body: Callable[[Any], Any]) -> None:
    code = reading(body)
    assert USES[body] in code.names
    assert "never" not in code.names, "nothing calls it"
    assert ("STEPS" in code.variables) == (USES[body] in ("append", "count"))


def test_all_methods_count_where_no_first_is_given() -> None:
    code = OwnCode([Base()])
    assert code.names["never"] == "Base.unused"
    assert code.uses({"first", "never", "other"}) == ("first", "Base.early")
    assert code.uses({"other"}) is None
    assert OwnCode([nn.Linear(2, 2)]).names == {}


def test_what_is_the_users_own() -> None:
    assert is_own(Base)
    assert is_own(helper)
    assert not is_own(nn.Linear)
    assert not is_own(functools.partial)
