import math

import pytest

from lightning_fed.lab.report.summary import Summary, counted, notes_on_window, summarize, summarize_found


def test_deviation_is_that_of_a_sample() -> None:
    # Mean 4; squared deviations 4 + 1 + 9 = 14, over 2.
    assert summarize([2, 3, 7]) == Summary(4.0, math.sqrt(7))
    assert summarize([2]) == Summary(2.0, None)
    assert math.isnan(summarize([0.1, math.nan]).std)
    assert summarize([0.1, 0.1, 0.1]).std == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize(("number", "text"), [(0, "0 runs"), (1, "1 run"), (2, "2 runs"), (12345, "12,345 runs")])
def test_plurals(number: int, text: str) -> None:
    assert counted(number, "run") == text


@pytest.mark.parametrize(("first", "missing"), [({0: 0.1, 1: 0.2, 2: 0.2}, []), ({0: 0.1, 2: 0.2}, ["1 was not"])])
def test_one_round_that_was_not_evaluated_was_not(first: dict[int, float], missing: list[str]) -> None:
    assert [note.rpartition("up to ")[2] for note in notes_on_window([first], "last 10")] == [f"{m}." for m in missing]


def test_one_of_a_thing_is_not_several() -> None:
    assert [counted(number, "run") for number in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]
    assert summarize_found([0.5, math.nan]).text(1, False) == "1 of 1 seed"
