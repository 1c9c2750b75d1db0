"""What a module and the user's own code around it hold, compared and put back."""

import random
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MaxMetric, Metric, MetricCollection

from lightning_fed.engines.trial import Attributes, parts_of, without_trace


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


ARRAY, FIGURE = np.zeros(3), 1.5
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


class Lazy(OrderedDict[str, Any]):
    """As transformers' tables of models: only ``mapping`` makes one, and reading it anyhow loads everything."""

    def __init__(self, mapping: dict[str, Any]) -> None:
        super().__init__(mapping)

    def refuse(self, *_: Any, **__: Any) -> Any:
        raise AssertionError

    keys = values = items = copy = clear = update = __iter__ = __len__ = refuse  # type: ignore[assignment]


class Locked(dict[str, Any]):
    """As frozen configurations are."""

    def refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("locked")

    __setitem__ = __delitem__ = clear = update = pop = copy = refuse  # type: ignore[assignment]


class Both(dict[str, Any]):
    """As EasyDict: its entries are attributes too."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(entries)
        vars(self).update(entries)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value
        object.__setattr__(self, name, value)


class Itself(dict[Any, Any]):
    """As AttrDict: its attributes are its entries."""

    def __init__(self, entries: dict[Any, Any]) -> None:
        super().__init__(entries)
        self.__dict__ = self


class Odd(list[int]):
    """Says nothing right of itself."""

    def refuse(self, *_: Any) -> Any:
        raise AssertionError

    __iter__ = __len__ = copy = clear = extend = refuse  # type: ignore[assignment]


class Tight(set[int]):
    def __init__(self, first: int, second: int) -> None:
        super().__init__((first, second))


class Pair(NamedTuple):
    """A tuple whose parts are followed."""

    names: list[str]
    more: Any


def entries(container: Any) -> Any:
    """What a container holds, whatever its class says."""
    base = next(base for base in (OrderedDict, dict, list, set) if isinstance(container, base))
    return list(base.items(container)) if issubclass(base, dict) else sorted(base.__iter__(container))  # type: ignore[arg-type]


CONTAINERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "lazy": (lambda: Lazy({"a": 1, "b": 2}), lambda held: OrderedDict.__setitem__(held, "a", 2)),
    "order": (lambda: Lazy({"a": 1, "b": 2}), lambda held: held.move_to_end("a")),
    "locked": (lambda: Locked(a=1), lambda held: dict.__setitem__(held, "a", 2)),
    "both": (lambda: Both(a=1, b=2), lambda held: setattr(held, "a", 2)),
    "itself": (lambda: Itself({"a": 1, 3: 4}), lambda held: held.update({"a": 2, 3: 5})),
    "default": (lambda: defaultdict(list, {"a": [1]}), lambda held: held["b"]),
    "count": (lambda: Counter("aab"), lambda held: held.update("a")),
    "odd": (lambda: Odd([1, 2]), lambda held: list.append(held, 3)),
    "tight": (lambda: Tight(1, 2), lambda held: set.add(held, 3)),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_of_any_class_are_compared_and_put_back(name: str) -> None:
    make, change = CONTAINERS[name]
    part = nn.Module()
    part.held = held = make()
    before, known = Attributes(part, ()), vars(held).copy() if hasattr(held, "__dict__") else {}
    assert list(before.changes()) == []
    change(held)
    assert set(before.changes()) == {(part, "held")}
    before.put_back()
    assert list(before.changes()) == []
    assert part.held is held
    assert type(held) is type(make())
    assert entries(held) == entries(make())
    assert getattr(held, "default_factory", None) is getattr(make(), "default_factory", None)
    assert known == (vars(held) if hasattr(held, "__dict__") else {})


def test_parts_of_named_tuples_are_followed() -> None:
    part = nn.Module()
    part.pair = Pair(["a"], Lazy({"b": [1]}))
    before = Attributes(part, ())
    part.pair.names.append("c")
    OrderedDict.__getitem__(part.pair.more, "b").append(2)
    assert list(before.changes()) == [(part, "pair"), (part, "pair")]
    before.put_back()
    assert part.pair == Pair(["a"], Lazy({"b": [1]}))


def test_what_cannot_be_put_back_is_left_out() -> None:
    part = nn.Module()
    part.stream, part.fixed, part.long = random.SystemRandom(), np.frombuffer(b"ab", np.uint8), Odd(range(20_000))
    before = Attributes(part, ())
    part.long.append(1)
    assert list(before.changes()) == []
    before.put_back()
    assert list.__len__(part.long) == 20_001


class InPlace(Metric):
    """Adds up in place, as many people's metrics do."""

    total: Tensor

    def __init__(self, times: float) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.times = times

    def update(self, values: Tensor) -> None:
        self.total += values.sum()

    def compute(self) -> Tensor:
        return self.times * self.total


def test_a_collection_counts_each_time_as_at_first() -> None:
    """It notes in lists of a dict which metrics share a state, and then updates one of them."""
    module = nn.ModuleDict({"pair": MetricCollection({"one": InPlace(1.0), "two": InPlace(2.0), "most": MaxMetric()})})
    pair: Any = module["pair"]
    for _ in range(3):
        with without_trace(module):
            for batch in (torch.ones(2), torch.ones(3)):
                pair.update(batch)
            assert {name: float(value) for name, value in pair.compute().items()} == {"one": 5, "two": 10, "most": 1}
        assert [*pair._groups.values()] == [["most"], ["one"], ["two"]]
