import csv
import math
from pathlib import Path

import pytest

from lightning_fed.lab.report.load import Method
from lightning_fed.lab.report.tables import (
    Summary,
    counted,
    format_table,
    method_rows,
    notes_on_window,
    summarize,
    summarize_found,
    table_title,
    write_csv,
)
from tests.lab.report.parts import method


def measured(label: str, *curves: list[float], metric: str = "test/acc") -> Method:
    return method(label, *({metric: dict(enumerate(curve))} for curve in curves))


def test_deviation_is_that_of_a_sample() -> None:
    # Mean 4; squared deviations 4 + 1 + 9 = 14, over 2.
    assert summarize([2, 3, 7]) == Summary(4.0, math.sqrt(7))
    assert summarize([2]) == Summary(2.0, None)
    assert math.isnan(summarize([0.1, math.nan]).std)
    assert summarize([0.1, 0.1, 0.1]).std == pytest.approx(0, abs=1e-15)


def test_row_by_hand() -> None:
    # Run 0: final 0.5, best 0.9, last ten of 0.9, 0.1 x 9, 0.5: (9 * 0.1 + 0.5) / 10 = 0.14.
    # Run 1: final 0.7, best 0.8, fewer than ten: (0.6 + 0.8 + 0.7) / 3 = 0.7.
    (row,) = method_rows([measured("FedAvg", [0.9] + [0.1] * 9 + [0.5], [0.6, 0.8, 0.7])], "test/acc")
    assert (row.method.label, len(row.method.runs), row.last_rounds) == ("FedAvg", 2, (10, 2))
    assert row.summaries["final"].mean == pytest.approx(0.6)
    assert row.summaries["final"].std == pytest.approx(0.2 / math.sqrt(2))
    assert row.summaries["best"].mean == pytest.approx(0.85)
    assert row.summaries["best"].std == pytest.approx(0.1 / math.sqrt(2))
    assert row.summaries["last10"].mean == pytest.approx(0.42)
    assert row.summaries["last10"].std == pytest.approx(0.56 / math.sqrt(2))


def test_the_last_ten_are_rounds_not_evaluations() -> None:
    curve = {at: at / 100 for at in range(0, 31, 5)}
    (row,) = method_rows([method("FedAvg", {"test/acc": curve})], "test/acc")
    assert row.summaries["last10"].mean == pytest.approx((0.25 + 0.30) / 2)


def test_order_follows_the_metric_and_puts_nan_last() -> None:
    curves = {"low": [0.3, 0.1], "nan": [0.4, math.nan], "high": [0.1, 0.3]}
    accuracies = method_rows([measured(label, curve) for label, curve in curves.items()], "test/acc")
    assert [row.method.label for row in accuracies] == ["high", "low", "nan"]
    assert [row.summaries["best"].mean for row in accuracies] == [0.3, 0.3, 0.4]
    losses = [measured(label, curve, metric="val/loss") for label, curve in curves.items()]
    rows = method_rows(losses, "val/loss")
    assert [row.method.label for row in rows] == ["low", "high", "nan"]
    assert [row.summaries["best"].mean for row in rows] == [0.1, 0.1, 0.4]


def test_text_of_accuracies_is_in_percent() -> None:
    rows = method_rows([measured("GMA", [0.5, 0.9]), measured("FedAvg+Mask", [0.5, 0.91], [0.5, 0.93])], "test/acc")
    assert format_table(rows, "test/acc").splitlines() == [
        "method       seeds  final (%)     best (%)      mean of last 10 (%)",
        "-----------  -----  ------------  ------------  -------------------",
        "FedAvg+Mask  2      92.00 ± 1.41  92.00 ± 1.41  71.00 ± 0.71",
        "GMA          1      90.00 ± -     90.00 ± -     70.00 ± -",
    ]


def test_text_of_losses_and_of_accuracies_in_percent_is_as_measured() -> None:
    loss = method_rows([measured("A", [1.23456, 0.5], metric="val/loss")], "val/loss")
    assert format_table(loss, "val/loss").splitlines()[2].split() == ["A", "0.5", "0.5", "0.8673"]
    percent = method_rows([measured("A", [50.0, 90.0])], "test/acc")
    assert "(%)" not in format_table(percent, "test/acc")
    assert format_table(percent, "test/acc").splitlines()[2].split() == ["A", "90", "90", "70"]


def test_a_number_of_seeds_that_all_have_is_in_the_title() -> None:
    two = method_rows([measured("A", [0.5], [0.6]), measured("B", [0.7], [0.8])], "test/acc")
    assert table_title(two, "test/acc") == "test/acc, mean ± std over 2 seeds"
    assert format_table(two, "test/acc").splitlines()[0].split()[:2] == ["method", "final"]
    some = method_rows([measured("A", [0.5], [0.6]), measured("B", [0.7])], "test/acc")
    assert table_title(some, "test/acc") == "test/acc, mean ± std over 1 to 2 seeds"
    assert format_table(some, "test/acc").splitlines()[0].split()[:2] == ["method", "seeds"]
    assert table_title(some[:1], "test/acc") == "test/acc, one seed"


@pytest.mark.parametrize(("number", "text"), [(0, "0 runs"), (1, "1 run"), (2, "2 runs"), (12345, "12,345 runs")])
def test_plurals(number: int, text: str) -> None:
    assert counted(number, "run") == text


@pytest.mark.parametrize(("first", "missing"), [({0: 0.1, 1: 0.2, 2: 0.2}, []), ({0: 0.1, 2: 0.2}, ["1 was not"])])
def test_one_round_that_was_not_evaluated_was_not(first: dict[int, float], missing: list[str]) -> None:
    assert [note.rpartition("up to ")[2] for note in notes_on_window([first], "last 10")] == [f"{m}." for m in missing]


def test_csv_holds_the_values_as_measured(tmp_path: Path) -> None:
    rows = method_rows([measured("B", [0.5, 0.75]), measured("A, masked", [0.25, 0.25], [0.25, 0.75])], "test/acc")
    write_csv(rows, "test/acc", tmp_path / "report.csv")
    with (tmp_path / "report.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert [first["method"], second["method"]] == ["B", "A, masked"]
    assert (first["metric"], first["seeds"], first["rounds"]) == ("test/acc", "1", "1")
    assert (first["final_mean"], first["final_std"], first["last10_mean"]) == ("0.75", "", "0.625")
    assert float(second["final_std"]) == pytest.approx(0.5 / math.sqrt(2))


def test_one_of_a_thing_is_not_several() -> None:
    assert [counted(number, "run") for number in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]
    assert summarize_found([0.5, math.nan]).text(1, False) == "1 of 1 seed"
