"""Simulated time: who arrives, with how many steps, and how long the round takes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fed.errors import FederatedError
from lightning_fed.sampling import Stragglers


def arrive(rule: Stragglers, steps: list[int], times: list[float], wanted: int) -> tuple[Any, ...]:
    found = rule.arrive(np.array(steps, dtype=np.int64), np.array(times, dtype=np.float64), wanted)
    return found.kept.tolist(), found.steps.tolist(), found.late, found.seconds


STEPS, TIMES = [4, 4, 4, 2, 1], [1.0, 3.0, 2.0, 5.0, 20.0]  # they arrive after 4, 12, 8, 10 and 20 seconds


@pytest.mark.parametrize(
    ("options", "wanted", "expected"),
    [
        ({}, 5, ([0, 1, 2, 3, 4], STEPS, 0, 20.0)),
        ({"exchange_time": 2.0}, 5, ([0, 1, 2, 3, 4], STEPS, 0, 22.0)),
        ({"deadline": 10.0}, 5, ([0, 2, 3], [4, 4, 2], 2, 10.0)),
        ({"deadline": 10.0, "late": "partial"}, 5, ([0, 1, 2, 3], [4, 3, 4, 2], 2, 10.0)),
        ({"deadline": 3.0}, 5, ([], [], 5, 3.0)),
        ({"deadline": 100.0}, 5, ([0, 1, 2, 3, 4], STEPS, 0, 20.0)),
        ({"deadline": 11.0, "exchange_time": 2.0, "late": "partial"}, 5, ([0, 1, 2, 3], [4, 3, 4, 1], 3, 11.0)),
        ({}, 3, ([0, 2, 3], [4, 4, 2], 0, 10.0)),
        ({"deadline": 9.0}, 2, ([0, 2], [4, 4], 0, 8.0)),
        ({"deadline": 9.0}, 3, ([0, 2], [4, 4], 3, 9.0)),
        ({"deadline": 9.0, "late": "partial"}, 3, ([0, 2, 3], [4, 4, 1], 1, 9.0)),
    ],
)
def test_arrivals_are_those_counted_by_hand(options: dict[str, Any], wanted: int, expected: Any) -> None:
    assert arrive(Stragglers(**options), STEPS, TIMES, wanted) == expected


def test_nobody_drawn_takes_no_time() -> None:
    for rule in (Stragglers(), Stragglers(deadline=2.0)):
        assert arrive(rule, [], [], 3) == ([], [], 0, 0.0)


def test_a_step_that_ends_with_the_deadline_counts() -> None:
    """0.3 / 0.1 is a little less than 3 in floating point."""
    assert arrive(Stragglers(deadline=0.3), [3], [0.1], 1) == ([0], [3], 0, pytest.approx(0.3))


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_arrivals_are_those_of_a_clock_that_ticks(data: st.DataObject) -> None:
    """Whole seconds, one after the other, for every client."""
    count = data.draw(st.integers(1, 6))
    whole = st.lists(st.integers(1, 6), min_size=count, max_size=count)
    steps, times = data.draw(whole), data.draw(whole)
    wanted, deadline = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 40))
    late = data.draw(st.sampled_from(["drop", "partial"]))
    done, finished, second = [0] * count, [0] * count, 0
    while second < deadline and sum(f > 0 for f in finished) < min(wanted, count):
        second += 1
        for i in range(count):
            done[i] = min(second // times[i], steps[i])
            finished[i] = finished[i] or (second if done[i] == steps[i] else 0)
    kept, taken, missed, seconds = arrive(Stragglers(float(deadline), late), steps, list(map(float, times)), wanted)
    assert seconds == second
    whole_ones = [i for i in kept if finished[i]]
    assert len(whole_ones) == min(wanted, sum(f > 0 for f in finished))
    assert all(n == steps[i] for i, n in zip(kept, taken, strict=True) if finished[i])
    cut = {i: n for i, n in zip(kept, taken, strict=True) if not finished[i]}
    assert cut == {i: done[i] for i in cut}
    assert late == "partial" or not cut
    if late == "partial" and len(kept) < wanted:
        assert set(kept) == {i for i in range(count) if done[i]}
    assert missed == len(cut) + (count - len(kept) if len(kept) < min(wanted, count) else 0)


def test_speeds_are_lognormal_and_a_clients_own() -> None:
    rule = Stragglers(step_time=0.2, spread=0.7)
    times = rule.step_times(20_000, 3)
    assert np.median(times) == pytest.approx(0.2, rel=0.05)
    assert np.log(times).std() == pytest.approx(0.7, rel=0.03)
    assert np.array_equal(rule.step_times(10, 3), times[:10])
    assert not np.array_equal(rule.step_times(10, 4), times[:10])
    assert Stragglers(spread=0.0).step_times(3, 0).tolist() == [1.0, 1.0, 1.0]
    assert Stragglers(step_time=[3, 1]).step_times(2, 0).tolist() == [3, 1]
    with pytest.raises(FederatedError, match=r"stragglers\.step_time`.*each of 3 clients, got 2"):
        Stragglers(step_time=[3, 1]).step_times(3, 0)


@pytest.mark.parametrize(("factor", "wanted", "drawn"), [(1.0, 10, 10), (1.3, 10, 13), (1.1, 10, 11), (1.01, 10, 11)])
def test_over_selection_draws_more(factor: float, wanted: int, drawn: int) -> None:
    assert Stragglers(over_selection=factor).selected(wanted) == drawn


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("deadline", 0), ("deadline", "x"), ("late", "wait"), ("over_selection", 0.9), ("step_time", 0),
        ("step_time", [1, -1]), ("step_time", "x"), ("spread", -0.1), ("spread", 11), ("step_time", 1e300),
        ("exchange_time", -1),
    ],
)  # fmt: skip
def test_arguments_out_of_range_are_refused(option: str, value: Any) -> None:
    with pytest.raises(FederatedError, match=rf"^Expected `--trainer\.participation\.stragglers\.{option}` to be "):
        Stragglers(**{option: value})
    with pytest.raises(FederatedError, match=r"^Expected `--trainer.*\.stragglers\.deadline` to be .*above 5"):
        Stragglers(deadline=5.0, exchange_time=5.0)
