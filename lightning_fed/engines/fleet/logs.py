"""What modules log, as rows of numbers in a packet, and back."""

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

from lightning_fed.core.logged_values import LoggedValue, LogOptions, expect_free
from lightning_fed.core.recorder import MetricRecorder
from lightning_fed.engines.fleet.packets import Facts
from lightning_fed.errors import expect

__all__ = ["kinds_of", "logged_of", "options_of", "rows_of", "unlike_most"]

_Owner = TypeVar("_Owner", bound=Hashable)


def rows_of(recorder: MetricRecorder, kinds: list[list[Any]]) -> list[list[float]]:
    """Takes what was logged: of each name its place in ``kinds``, which grows, and three numbers."""
    recorder.read()
    series, recorder.series = recorder.series, {}
    rows = list[list[Any]]()
    for key, value in series.items():
        kind = [key, list(vars(value.options).values()), value.reduction, value.is_default]
        if value.total is not None:
            kinds += [] if kind in kinds else [kind]
            rows.append([kinds.index(kind), value.total, value.weight, value.last])
    return rows


def options_of(key: str, shown: list[Any]) -> LogOptions:
    """Returns how a name is shown; refuses those of the trainer's own."""
    options = LogOptions(*shown)
    sound = key == f"{options.name}{options.suffix}" and list(map(type, shown)) == [str, str, bool, bool, bool]
    expect(sound, f"Expected {key[:100]!r} to be shown as its name says, got {str(shown)[:100]}.")
    for name in (key, options.name):
        expect_free(name)
    return options


def kinds_of(facts: Facts) -> list[Any]:
    """Returns the names that clients logged, with how each is shown and reduced."""
    return [(str(key), options_of(str(key), shown), by, bool(default)) for key, shown, by, default in facts["log"]]


def logged_of(kinds: list[Any], rows: list[list[float]]) -> dict[str, LoggedValue]:
    """Returns what a client logged, by name, from four numbers each: which name, total, weight and last value."""
    found: dict[str, LoggedValue] = {}
    for at, total, weight, last in rows:
        key, shown, by, default = kinds[int(at)]
        found[key] = value = LoggedValue(shown, by, default)
        value.total, value.weight, value.last = float(total), float(weight), float(last)
        expect(
            weight > 0 or value.reduction != "mean", f"Expected a mean of {key!r} over something, got one over nothing."
        )
    return found


def unlike_most(kinds: Mapping[_Owner, Mapping[Any, Hashable]]) -> dict[_Owner, Any]:
    """Returns, with the name, who sends under a name something of another kind than most do."""
    counts: dict[Any, Counter[Hashable]] = {}
    for own in kinds.values():
        for name, kind in own.items():
            counts.setdefault(name, Counter())[kind] += 1
    usual = {name: count.most_common(1)[0][0] for name, count in counts.items()}
    return {owner: name for owner, own in kinds.items() for name, kind in own.items() if kind != usual[name]}
