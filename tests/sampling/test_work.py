"""Work of each client's own: drawn from the ranges that were given, and nothing else is changed."""

from typing import Any

import numpy as np
import pytest

from lightning_fed.errors import FederatedError
from lightning_fed.sampling import UnequalWork

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
