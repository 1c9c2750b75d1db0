"""Metrics at equal loss, and curves that have not ended, by curves with known answers."""

import math
from dataclasses import replace

import pytest

from lightning_fed.errors import FederatedError
from lightning_fed.lab.studies.levels import still_improves
from lightning_fed.lab.studies.results import StudyResults
from lightning_fed.lab.studies.study import AxisValue, Name, Report, Study, expect_sound
from lightning_fed.lab.studies.table import study_table
from tests.lab.studies.parts import study_run

AT = "at equal train/loss"


def study(**report: object) -> Study:
    rules = {Name(rule): AxisValue() for rule in ("FedAvg", "GMA")}
    options = {"metric": ["test/acc"], "statistic": [AT], "baseline": {"rule": "FedAvg"}, **report}
    return Study("T", "t", axes={Name("rule"): rules}, seeds=[0, 1], report=Report(**options))


def run(rule: str, seed: int, losses: dict[int, float], accuracies: dict[int, float]):
    return study_run(seed, {"test/acc": accuracies, "train/loss": losses}, rule=rule)


# Levels: 0.5 of seed 0, where GMA ends and FedAvg is at round 2; 0.42 of seed 1, where FedAvg ends.
RUNS = (
    run("FedAvg", 0, {1: 0.9, 2: 0.5, 3: 0.3, 4: 0.2}, {1: 0.1, 2: 0.5, 3: 0.7, 4: 0.8}),
    run("FedAvg", 1, {1: 0.8, 2: 0.6, 3: 0.42}, {1: 0.1, 2: 0.4, 3: 0.6}),
    run("GMA", 0, {1: 0.9, 2: 0.8, 3: 0.7, 4: 0.5}, {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.6}),
    run("GMA", 1, {1: 0.8, 2: 0.41, 3: 0.6}, {1: 0.1, 2: 0.65, 3: 0.5}),
)


def values(runs: tuple, **report: object) -> tuple[dict[str, tuple[float, ...]], tuple[str, ...]]:
    table = study_table(study(**report), StudyResults("t", "full", runs))
    return {cell.names["rule"]: cell.values for cell in table.cells.values()}, table.notes


def test_each_seed_is_read_where_all_of_its_runs_have_fallen_to_one_level() -> None:
    found, notes = values(RUNS)
    assert found == {"FedAvg": (0.5, 0.6), "GMA": (0.6, 0.65)}
    assert notes[-1] == f"`{AT}` takes `test/acc` at rounds 2 to 4 of the runs."
    table = study_table(study(), StudyResults("t", "full", RUNS))
    (difference,) = [cell.difference for cell in table.cells.values() if cell.difference]
    assert difference.mean == pytest.approx((0.1 + 0.05) / 2)
    at_equal_rounds, _ = values(RUNS, statistic=["final"])
    assert at_equal_rounds == {"FedAvg": (0.8, 0.6), "GMA": (0.6, 0.5)}


def test_only_rounds_in_which_both_were_measured_count() -> None:
    """The level of seed 0 is then 0.7 of round 3, below which FedAvg is first measured at its end."""
    rare = (
        run("FedAvg", 0, {1: 0.9, 2: 0.5, 3: 0.3, 4: 0.2}, {1: 0.1, 4: 0.8}),
        run("GMA", 0, {1: 0.9, 2: 0.8, 3: 0.7, 4: 0.5}, {1: 0.1, 3: 0.3}),
    )
    assert values(rare)[0] == {"FedAvg": (0.8,), "GMA": (0.3,)}


@pytest.mark.parametrize("lost", [{1: 0.9, 2: math.nan}, {}])
def test_a_run_without_a_level_is_said_and_lowers_that_of_no_other(lost: dict[int, float]) -> None:
    found, notes = values((*RUNS[:3], run("GMA", 1, lost, {1: 0.1, 2: 0.3})))
    assert found["FedAvg"] == (0.5, 0.6)
    assert found["GMA"][0] == 0.6
    assert math.isnan(found["GMA"][1])
    why = "they diverged, or no round has both `train/loss` and `test/acc`"
    assert f"1 of 4 runs have no value at equal `train/loss`: {why}." in notes


def test_mistakes_name_what_there_is() -> None:
    with pytest.raises(FederatedError, match=r"Expected `report.baseline` with the statistic 'at equal train/loss'"):
        expect_sound(study(baseline={}))
    with pytest.raises(FederatedError, match=r"name a loss .* \(test/acc, train/loss\), got 'x'"):
        values(RUNS, statistic=["at equal x"])


@pytest.mark.parametrize(
    ("curve", "metric", "improves"),
    [
        ({at: at / 100 for at in range(1, 51)}, "test/acc", True),
        ({at: at / 100 for at in range(1, 51)}, "test/loss", False),
        ({at: min(at, 40) / 100 for at in range(1, 51)}, "test/acc", False),
        # The slope of (0, 1, 0, 1, ...) at rounds 41 to 50 is 2.5 / 82.5 = 0.030, its standard error 0.061.
        ({at: (at + 1) % 2 for at in range(1, 51)}, "test/acc", False),
        # 0.01 a round and a tenth of that noise: 0.0130 with 0.0061.
        ({at: at / 100 + (at + 1) % 2 / 10 for at in range(1, 51)}, "test/acc", True),
        ({at: at / 100 for at in (10, 20, 30, 40, 45, 47, 50)}, "test/acc", None),
        ({**{at: at / 100 for at in range(1, 51)}, 51: math.nan}, "test/acc", None),
    ],
)
def test_a_slope_above_its_noise_still_improves(curve: dict[int, float], metric: str, improves: bool | None) -> None:
    assert still_improves(curve, metric) is improves


def test_the_table_says_how_many_runs_still_rise() -> None:
    rising, flat = ({at: level(at) for at in range(1, 51)} for level in (lambda at: at / 100, lambda at: 0.5))
    runs = [run("FedAvg", 0, {1: 1}, rising), run("FedAvg", 1, {1: 1}, flat), run("GMA", 0, {1: 1}, rising)]
    results = StudyResults("t", "full", tuple(runs))
    told = "`test/acc` still rising over the last fifth of the rounds: FedAvg 1 of 2; GMA 1 of 1."
    assert told in study_table(study(statistic=["best"], plateau=True), results).notes
    assert told not in study_table(study(statistic=["best"]), results).notes
    without = replace(results, runs=tuple(replace(one, curves={"test/acc": {1: 0.5}}) for one in runs))
    assert not any("still" in note for note in study_table(study(statistic=["best"], plateau=True), without).notes)
