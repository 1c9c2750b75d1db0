import math

import pytest

from lightning_fed.errors import FederatedError
from lightning_fed.lab.report.budgets import at_budget, derived_columns, to_target
from lightning_fed.lab.report.tables import Summary, format_table, method_rows
from tests.lab.report.parts import method

COLUMNS = {
    "test/acc": {0: 0.1, 2: 0.6, 4: 0.5, 5: 0.8},
    "val/loss": {0: 2.0, 2: 0.7, 4: 0.9, 5: 0.4},
    "time/round": {1: 1.0, 2: 2.0, 3: 4.0, 4: 8.0, 5: 16.0},
    "gradients": {1: 10.0, 2: 20.0, 3: 30.0, 4: 40.0, 5: 50.0},
    "comm/bytes_up": {1: 5.0, 2: 10.0, 3: 15.0, 4: 20.0, 5: 25.0},
    "comm/bytes_down": {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0},
}
(RUN,) = method("A", COLUMNS).runs


@pytest.mark.parametrize(
    ("x", "to_06", "to_07", "budget", "within"),
    [
        ("round", 2, 5, 4, 0.5),
        ("round", 2, 5, 3.9, 0.6),
        ("time", 3, 31, 15, 0.5),
        ("time", 3, 31, 14.9, 0.6),
        ("gradients", 20, 50, 19, 0.1),
        ("comm/bytes", 12, 30, 1e9, 0.8),
        ("comm/bytes_up", 10, 25, 0, 0.1),
    ],
)
def test_by_hand(x: str, to_06: float, to_07: float, budget: float, within: float) -> None:
    assert to_target(RUN, "test/acc", x, 0.6) == to_06
    assert to_target(RUN, "test/acc", x, 0.7) == to_07
    assert math.isnan(to_target(RUN, "test/acc", x, 0.81))
    assert at_budget(RUN, "test/acc", x, budget) == within


def test_a_loss_reaches_its_target_from_above() -> None:
    assert [to_target(RUN, "val/loss", "round", target) for target in (2.5, 0.7, 0.5)] == [0, 2, 5]
    assert math.isnan(to_target(RUN, "val/loss", "round", 0.3))


def test_nothing_is_reached_before_the_first_evaluation_and_nan_is_no_target() -> None:
    (run,) = method("A", {"test/acc": {2: math.nan, 4: 0.5}}).runs
    assert math.isnan(at_budget(run, "test/acc", "round", 1))
    assert to_target(run, "test/acc", "round", 0.1) == 4
    with pytest.raises(FederatedError, match=r"--x.*'gradients'"):
        to_target(run, "test/acc", "gradients", 0.1)


def test_columns_of_the_table_and_seeds_that_do_not_arrive() -> None:
    half = {**COLUMNS, "test/acc": {0: 0.1, 5: 0.7}}
    methods = [method("A", COLUMNS, COLUMNS), method("B", COLUMNS, half)]
    derived = derived_columns(methods, "test/acc", "comm/bytes_up", 10, 0.8)
    assert list(derived) == [
        "at comm/bytes_up 10", "comm/bytes_up to 0.8", "round to 0.8", "comm/bytes to 0.8", "gradients to 0.8",
        "time to 0.8",
    ]  # fmt: skip
    rows = {row.method.label: row for row in method_rows(methods, "test/acc", derived)}
    assert rows["A"].summaries["at comm/bytes_up 10"] == Summary(0.6, 0)
    assert rows["B"].summaries["at comm/bytes_up 10"].mean == pytest.approx(0.35)
    assert [summary.mean for summary in list(rows["A"].summaries.values())[4:]] == [25, 5, 30, 50, 31]
    assert {summary.found for summary in list(rows["B"].summaries.values())[4:]} == {1}
    text = format_table(list(rows.values()), "test/acc").splitlines()
    assert "at comm/bytes_up 10 (%)  comm/bytes_up to 0.8  round to 0.8 " in text[0]
    assert text[2].split("  ")[-1] == "31 ± 0"
    assert text[3].endswith("1 of 2 seeds")
    assert "35.00 ± 35.36" in text[3]


def test_only_what_every_run_measured_is_counted() -> None:
    methods = [method("A", COLUMNS), method("B", {"test/acc": {0: 0.1}, "gradients": {1: 1.0}})]
    assert list(derived_columns(methods, "test/acc", "round", None, 0.5)) == ["round to 0.5", "gradients to 0.5"]
    assert derived_columns(methods, "test/acc", "round", None, None) == {}
