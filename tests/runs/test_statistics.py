import math
from collections.abc import Iterator

import pytest

from lightning_fed.errors import FederatedError
from lightning_fed.runs.statistics import expect_statistic, first_as_good, is_reached, missing_rounds, run_statistic

# Every fifth round and the last: of the rounds after 41 - 10 those are 35, 40 and 41.
CURVE = {at: at / 100 for at in [*range(0, 41, 5), 41]}


@pytest.mark.parametrize(
    ("statistic", "value", "missing"),
    [
        ("best", 0.41, 0),
        ("final", 0.41, 0),
        ("last 10", (0.35 + 0.40 + 0.41) / 3, 7),
        ("last 1", 0.41, 0),
        ("last 50 %", (0.25 + 0.30 + 0.35 + 0.40 + 0.41) / 5, 15),  # 20 of 41 rounds, 22 to 41
        ("last 1 %", 0.41, 0),
        ("last 100 %", (0.05 * sum(range(1, 9)) + 0.41) / 9, 32),  # without round 0
        ("rounds 11-20", (0.15 + 0.20) / 2, 8),
        ("rounds 40-50", (0.40 + 0.41) / 2, 9),
        ("rounds 41-41", 0.41, 0),
        ("rounds 42-50", math.nan, 9),
    ],
)
def test_windows_are_of_rounds(statistic: str, value: float, missing: int) -> None:
    expect_statistic("statistic", statistic)
    assert run_statistic(CURVE, statistic, "test/acc") == pytest.approx(value, nan_ok=True)
    assert missing_rounds(CURVE, statistic) == missing
    assert is_reached(CURVE, statistic) == (not math.isnan(value))


class Passes(dict[int, float]):
    """A curve that counts how often it is gone through."""

    count = 0

    def __iter__(self) -> Iterator[int]:
        self.count += 1
        return super().__iter__()


@pytest.mark.parametrize("statistic", ["best", "last 10", "last 10 %", "rounds 11-20"])
def test_whether_a_statistic_is_reached_is_seen_in_one_pass(statistic: str) -> None:
    curve = Passes(CURVE)
    assert is_reached(curve, statistic)
    assert not is_reached({}, statistic)
    assert curve.count <= 1


def test_a_run_of_fewer_rounds_counts_as_far_as_it_goes() -> None:
    assert run_statistic({0: 0.2, 1: 0.4}, "last 10", "test/acc") == pytest.approx(0.3)
    assert missing_rounds({0: 0.2, 1: 0.4}, "last 10") == 0
    assert math.isnan(run_statistic({}, "final", "test/acc"))


def test_best_follows_the_metric_and_leaves_nan_out() -> None:
    curve = {1: math.nan, 2: 0.2, 3: 0.5}
    assert run_statistic(curve, "best", "test/acc") == 0.5
    assert run_statistic(curve, "best", "test/loss") == 0.2
    assert run_statistic(curve, "best", "attack/logistic_regression/accuracy") == 0.2
    assert math.isnan(run_statistic({1: math.nan}, "best", "test/acc"))


def test_the_first_round_as_good_as_a_target() -> None:
    assert first_as_good(CURVE, "test/acc", 0.15) == 15
    assert first_as_good(CURVE, "test/acc", 0.5) is None
    assert first_as_good({1: math.nan, 4: 0.3, 5: 0.1}, "test/loss", 0.3) == 4


@pytest.mark.parametrize(
    "value", ["median", "last", "last 0", "last 0 %", "last 101 %", "last 5%", "rounds 9-3", "rounds 3", "last 10 "]
)
def test_what_is_no_statistic_is_refused(value: str) -> None:
    with pytest.raises(FederatedError, match=r"^Expected `report.statistic` to be `best`, .*rounds 171-200"):
        expect_statistic("report.statistic", value)
