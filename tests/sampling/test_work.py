"""How much clients work, and how long they take."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fed.errors import FederatedError
from lightning_fed.sampling import Stragglers, UnequalWork

STEPS = np.array([6, 0, 2, 4] * 500)
PER_EPOCH = STEPS // 2


def assign(work: UnequalWork, round: int = 1, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return work.assign(round, STEPS, PER_EPOCH, seed)


def test_steps_are_uniform_within_the_range() -> None:
    steps, factors = assign(UnequalWork(steps=[3, 5]))
    assert (steps[STEPS == 0] == 0).all(), "without data there is nothing to do"
    counts = np.bincount(steps[STEPS > 0])
    assert counts[:3].tolist() == [0, 0, 0]
    assert counts[3:] == pytest.approx(np.full(3, 500), abs=100)
    assert (factors == 1).all()


def test_epochs_are_those_of_each_clients_data() -> None:
    steps, _ = assign(UnequalWork(epochs=[1, 3]))
    for own in (1, 2, 3):
        assert set(steps[own == PER_EPOCH] // own) == {1, 2, 3}
        assert (steps[own == PER_EPOCH] % own == 0).all()


def test_rates_are_uniform_and_a_share_is_left_as_it_is() -> None:
    steps, factors = assign(UnequalWork(steps=[9, 9], lr=[0.5, 2.0], share=0.25))
    meant = steps == 9
    assert meant[STEPS > 0].mean() == pytest.approx(0.25, abs=0.05)
    assert (steps[~meant] == STEPS[~meant]).all()
    assert set(factors[~meant & (STEPS > 0)]) == {1.0}
    assert (factors[meant].min(), factors[meant].max()) == pytest.approx((0.5, 2.0), abs=0.02)
    assert factors[meant].mean() == pytest.approx(1.25, abs=0.1)


@pytest.mark.parametrize("redraw", [True, False])
def test_it_is_drawn_anew_or_kept(redraw: bool) -> None:
    work = UnequalWork(steps=[1, 9], lr=[0.5, 2.0], redraw=redraw)
    first, second = assign(work, 1), assign(work, 2)
    assert all(np.array_equal(a, b) for a, b in zip(first, assign(work, 1), strict=True))
    assert all(np.array_equal(a, b) != redraw for a, b in zip(first, second, strict=True))
    fewer = work.assign(1, STEPS[:7], PER_EPOCH[:7], 0)
    assert all(np.array_equal(a[:7], b) for a, b in zip(first, fewer, strict=True))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "none of them"), ({"steps": [1, 2], "epochs": [1, 2]}, "both"), ({"steps": [0, 2]}, "steps`"),
        ({"steps": [3, 2]}, "steps`"), ({"steps": [1]}, "steps`"), ({"epochs": [1.5, 2]}, "epochs`"),
        ({"lr": [0, 1]}, "lr`"), ({"lr": [1, float("inf")]}, "lr`"),
        ({"lr": [1, 1e300]}, "lr`"), ({"steps": [1, 10**23]}, "steps`"),
        ({"lr": [0.1, 1], "share": 2}, "share"),
    ],
)  # fmt: skip
def test_arguments_out_of_range_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(FederatedError, match=rf"^Expected .*`--trainer\.participation\.work\..*{words}"):
        UnequalWork(**given)


def arrive(rule: Stragglers, steps: list[int], times: list[float], wanted: int) -> tuple[Any, ...]:
    found = rule.arrive(np.array(steps, dtype=np.int64), np.array(times, dtype=np.float64), wanted)
    return found.kept.tolist(), found.steps.tolist(), found.late, found.seconds


TAKEN, TIMES = [4, 4, 4, 2, 1], [1.0, 3.0, 2.0, 5.0, 20.0]  # they arrive after 4, 12, 8, 10 and 20 seconds


@pytest.mark.parametrize(
    ("options", "wanted", "expected"),
    [
        ({}, 5, ([0, 1, 2, 3, 4], TAKEN, 0, 20.0)),
        ({"exchange_time": 2.0}, 5, ([0, 1, 2, 3, 4], TAKEN, 0, 22.0)),
        ({"deadline": 10.0}, 5, ([0, 2, 3], [4, 4, 2], 2, 10.0)),
        ({"deadline": 10.0, "late": "partial"}, 5, ([0, 1, 2, 3], [4, 3, 4, 2], 2, 10.0)),
        ({"deadline": 3.0}, 5, ([], [], 5, 3.0)),
        ({"deadline": 100.0}, 5, ([0, 1, 2, 3, 4], TAKEN, 0, 20.0)),
        ({"deadline": 11.0, "exchange_time": 2.0, "late": "partial"}, 5, ([0, 1, 2, 3], [4, 3, 4, 1], 3, 11.0)),
        ({}, 3, ([0, 2, 3], [4, 4, 2], 0, 10.0)),
        ({"deadline": 9.0}, 2, ([0, 2], [4, 4], 0, 8.0)),
        ({"deadline": 9.0}, 3, ([0, 2], [4, 4], 3, 9.0)),
        ({"deadline": 9.0, "late": "partial"}, 3, ([0, 2, 3], [4, 4, 1], 1, 9.0)),
    ],
)
def test_arrivals_are_those_counted_by_hand(options: dict[str, Any], wanted: int, expected: Any) -> None:
    assert arrive(Stragglers(**options), TAKEN, TIMES, wanted) == expected


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
def test_stragglers_refuse_arguments_out_of_range(option: str, value: Any) -> None:
    with pytest.raises(FederatedError, match=rf"^Expected `--trainer\.participation\.stragglers\.{option}` to be "):
        Stragglers(**{option: value})
    with pytest.raises(FederatedError, match=r"^Expected `--trainer.*\.stragglers\.deadline` to be .*above 5"):
        Stragglers(deadline=5.0, exchange_time=5.0)
