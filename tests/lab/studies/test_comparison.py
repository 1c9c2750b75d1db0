"""Tests of differences against independent formulas, verdicts by hand, and power by the noncentral t, integrated."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scipy import integrate, special

from lightning_fed.errors import FederatedError
from lightning_fed.lab.studies import comparison
from lightning_fed.lab.studies.comparison import (
    PairedDifference,
    Verdict,
    average_ranks,
    has_settled,
    holm_adjusted,
    is_level,
    paired_difference,
    pairs_needed,
    power,
    still_improves,
    verdict_on,
    visible_gain,
)
from lightning_fed.lab.studies.results import StudyResults
from lightning_fed.lab.studies.study import AxisValue, Name, Report, Study, expect_sound
from lightning_fed.lab.studies.table import study_table
from tests.lab.studies.parts import some_study, study_run

VALUES = np.random.default_rng(1).normal(0.8, 0.02, (2, 40)).round(4)


def student_density(x: float, df: int) -> float:
    scale = special.gamma((df + 1) / 2) / (math.sqrt(df * math.pi) * special.gamma(df / 2))
    return float(scale * (1 + x * x / df) ** (-(df + 1) / 2))


def tail(t: float, df: int) -> float:
    """P(|T| > t), the density integrated."""
    return 2 * (0.5 - integrate.quad(student_density, 0, abs(t), args=(df,))[0])


@pytest.mark.parametrize("n", [2, 3, 4, 10, 40])
def test_test_and_interval_are_students(n: int) -> None:
    values, baseline = VALUES[:, :n].tolist()
    found = paired_difference(values, baseline)
    differences = [Fraction(str(a)) - Fraction(str(b)) for a, b in zip(values, baseline, strict=True)]
    mean = sum(differences) / n
    error = math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1) / n)
    assert (found.pairs, found.mean) == (n, pytest.approx(float(mean)))
    assert found.p_value == pytest.approx(tail(float(mean) / error, n - 1), rel=1e-6)
    # The ends lie where 5 % of the distribution is further away.
    low, high = found.t_interval
    assert (low + high) / 2 == pytest.approx(float(mean))
    assert tail((high - low) / 2 / error, n - 1) == pytest.approx(0.05, rel=1e-6)


def test_the_bootstrap_is_near_that_of_all_draws_and_the_same_each_time() -> None:
    """Ten pairs, of which eight have no difference: all draws are those of how often each of the other two comes."""
    values = [0.0] * 8 + [1.0, 4.0]
    counts = [(a, b) for a, b in itertools.product(range(11), repeat=2) if a + b <= 10]
    chances = [math.comb(10, a) * math.comb(10 - a, b) * 0.1 ** (a + b) * 0.8 ** (10 - a - b) for a, b in counts]
    means = sorted(((a + 4 * b) / 10, chance) for (a, b), chance in zip(counts, chances, strict=True))
    below = special.ndtr(math.sqrt(10 / 9) * special.stdtrit(9, 0.025))
    ends = [means[int(np.searchsorted(np.cumsum([c for _, c in means]), share))][0] for share in (below, 1 - below)]
    found = paired_difference(values, [0.0] * 10)
    assert found.bootstrap == pytest.approx(ends, abs=0.11)
    assert found == paired_difference(values, [0.0] * 10)
    assert paired_difference(*VALUES).bootstrap != paired_difference(*VALUES, seed=1).bootstrap


@pytest.mark.parametrize("n", [10, 20])
def test_the_bootstrap_holds_the_true_mean_as_often_as_it_says(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The percentiles at 2.5 and 97.5 hold it in 89 % of the samples of ten."""
    monkeypatch.setattr(comparison, "_RESAMPLES", 999)
    samples = np.random.default_rng(7).normal(size=(600, n))
    ends = [paired_difference(sample, np.zeros(n)).bootstrap for sample in samples]
    assert 0.92 < np.mean([low <= 0 <= high for low, high in ends]) < 0.97


@pytest.mark.parametrize("n", [2, 3, 9])
def test_below_ten_pairs_there_is_no_bootstrap(n: int) -> None:
    found = paired_difference(*VALUES[:, :n])
    assert all(map(math.isfinite, found.t_interval))
    assert all(map(math.isnan, found.bootstrap))


def test_what_pairs_do_not_tell_is_nan() -> None:
    one = paired_difference([0.5], [0.25])
    assert (one.pairs, one.mean) == (1, 0.25)
    for found in (one, paired_difference([], []), paired_difference([0.5, math.nan], [0.1, 0.2])):
        assert all(math.isnan(value) for value in (*found.t_interval, *found.bootstrap, found.p_value))


@pytest.mark.parametrize(("gain", "p_value"), [(0.1, 0.0), (0.0, 1.0)])
def test_a_difference_without_spread(gain: float, p_value: float) -> None:
    values = [0.3, 0.7, 0.9] * 4
    found = paired_difference([value + gain for value in values], values)
    assert [*found.t_interval, *found.bootstrap] == pytest.approx([gain] * 4)
    assert all(map(math.isnan, paired_difference([value + gain for value in values[:9]], values[:9]).bootstrap))
    assert found.p_value == p_value


def rejected(p_values: list[float], level: float) -> set[int]:
    """Holm's procedure as it is stated: the smallest is compared with level/m, the next with level/(m-1), ..."""
    found: set[int] = set()
    for step, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > level / (len(p_values) - step):
            break
        found.add(index)
    return found


@pytest.mark.parametrize("p_values", [[0.01, 0.04, 0.03, 0.005], [0.5], [0.02, 0.02, 0.02], [0.9, 0.001, 0.6]])
def test_holm_rejects_as_the_steps_do(p_values: list[float]) -> None:
    adjusted = holm_adjusted(p_values)
    for level in np.linspace(0.0013, 0.9987, 301):
        assert {i for i, p in enumerate(adjusted) if p <= level} == rejected(p_values, level)


def test_holm_leaves_out_what_is_no_test() -> None:
    assert holm_adjusted([0.02, math.nan, 0.04]) == pytest.approx([0.04, math.nan, 0.04], nan_ok=True)
    assert holm_adjusted([]).tolist() == []


def test_ranks_by_hand() -> None:
    # Ranks on the data sets: 2, 1, 3; 2, 2.5, 1; 2, 2.5, 2: of a tie each has the mean, a run that diverged is last.
    values = np.array([[0.5, 0.7, math.nan], [0.5, 0.6, 0.9], [0.5, 0.6, 0.2]])
    assert average_ranks(values) == pytest.approx([2, 5.5 / 3, 6.5 / 3])
    assert average_ranks(values[:, 1:2], lower_is_better=True) == pytest.approx([3, 1.5, 1.5])


def test_a_difference_of_rounding_is_none() -> None:
    values = [0.1 + 0.2, 0.1 + 0.2, 0.1 + 0.2]
    assert paired_difference(values, [0.3] * 3).p_value == 1.0
    assert paired_difference([0.31] * 3, [0.3] * 3).p_value == 0.0


# t(0.975) of a table.
EDGE = {2: 12.706205, 3: 4.302653, 5: 2.776445, 10: 2.262157, 30: 2.045230}


def seen(gain: float, std: float, n: int) -> float:
    """P(|mean / (s / √n)| > t*) of n normal differences, over the chi distribution of s √(n - 1) / std."""
    df, shift = n - 1, gain * math.sqrt(n) / std

    def given(chi: float) -> float:
        edge = EDGE[n] * chi / math.sqrt(df)
        density = chi ** (df - 1) * math.exp(-chi * chi / 2) / (2 ** (df / 2 - 1) * special.gamma(df / 2))
        return float(density * (special.ndtr(shift - edge) + special.ndtr(-shift - edge)))

    return float(integrate.quad(given, 0, 40, limit=500, points=[math.sqrt(df)])[0])


@pytest.mark.parametrize("n", list(EDGE))
@pytest.mark.parametrize("gain", [0.0, 0.3, -1.0, 2.5])
def test_power_is_the_chance_to_reject(n: int, gain: float) -> None:
    assert power(abs(gain) * math.sqrt(n) / 1.5, n) == pytest.approx(seen(gain, 1.5, n), abs=2e-5)


@pytest.mark.parametrize("n", list(EDGE))
def test_the_visible_gain_is_seen_four_times_in_five(n: int) -> None:
    assert seen(visible_gain(0.7, n), 0.7, n) == pytest.approx(0.8, abs=2e-5)


def test_power_by_drawing() -> None:
    drawn = np.random.default_rng(0).normal(0.9, 1.0, (200_000, 10))
    t = drawn.mean(axis=1) / drawn.std(axis=1, ddof=1) * math.sqrt(10)
    assert power(0.9 * math.sqrt(10), 10) == pytest.approx(float((np.abs(t) > EDGE[10]).mean()), abs=4e-3)


@pytest.mark.parametrize(("gain", "std"), [(0.7, 2.4), (-0.7, 2.4), (5.0, 1.0), (0.5, 0.01), (0.05, 1.0)])
def test_the_seeds_that_are_needed_are_the_fewest(gain: float, std: float) -> None:
    n = pairs_needed(gain, std)
    assert n is not None
    assert power(abs(gain) * math.sqrt(n) / std, n) >= 0.8 - 1e-9
    assert n == 2 or power(abs(gain) * math.sqrt(n - 1) / std, n - 1) < 0.8


def test_what_no_number_of_seeds_sees() -> None:
    assert pairs_needed(0.0, 1.0) is None
    assert pairs_needed(1e-6, 1.0) is None
    assert pairs_needed(1.0, math.nan) is None
    assert math.isnan(visible_gain(math.nan, 1))


def judged(interval: tuple[float, float], *args: Any) -> Verdict:
    found = verdict_on(PairedDifference(3, sum(interval) / 2, interval, interval, 0.1, 1.0), *args)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("interval", "claimed", "word"),
    [
        ((0.1, 0.9), 0.5, "ahead"),
        ((0.1, 0.4), 0.5, "ahead by less than g"),
        ((-0.4, 0.4), 0.5, "level"),
        ((0.0, 0.0), 0.5, "level"),
        ((-0.6, 0.4), 0.5, "undecided"),
        ((-0.4, 0.6), 0.5, "undecided"),
        ((-0.9, -0.1), 0.5, "behind"),
        ((-0.9, -0.1), -0.5, "ahead"),
        ((-0.3, -0.1), -0.5, "ahead by less than g"),
        ((0.1, 0.9), -0.5, "behind"),
    ],
)
def test_words_on_a_question_of_ones_own(interval: tuple[float, float], claimed: float, word: str) -> None:
    better = -1 if claimed < 0 else 1
    assert judged(interval, claimed, better, True) == Verdict(claimed, word, word)
    assert judged(interval, claimed, better, False).word == "nothing learned"


@pytest.mark.parametrize(
    ("interval", "claimed", "failed", "here", "word"),
    [
        ((0.1, 0.9), 0.5, [], "ahead", "reproduced"),
        ((0.1, 0.2), 0.5, [], "ahead by less than g", "reproduced"),
        ((0.1, 0.9), 0.5, ["baseline"], "ahead", "undecided (baseline)"),
        ((-0.1, 0.4), 0.5, [], "level", "contradicted"),
        ((-0.1, 0.4), 0.5, ["baseline", "rates"], "level", "undecided (baseline, rates)"),
        ((-0.1, 0.6), 0.5, [], "undecided", "undecided (seeds)"),
        ((-0.1, 0.6), 0.5, ["rates"], "undecided", "undecided (seeds)"),
        ((-0.9, -0.1), 0.5, [], "behind", "contradicted"),
        ((-0.9, -0.1), -0.5, [], "behind", "reproduced"),  # a loss that the paper has too
        ((0.1, 0.9), -0.5, [], "ahead", "contradicted"),
    ],
)
def test_words_on_a_published_gain(
    interval: tuple[float, float], claimed: float, failed: list[str], here: str, word: str
) -> None:
    assert judged(interval, claimed, 1, True, failed) == Verdict(claimed, here, word, tuple(failed))
    assert judged(interval, claimed, 1, False, failed).word == "nothing learned"


def test_no_verdict_without_a_claim_or_an_interval() -> None:
    assert verdict_on(paired_difference([0.5, 0.6], [0.4, 0.6]), 0.0, 1, True) is None
    assert verdict_on(paired_difference([0.5], [0.4]), 0.1, 1, True) is None


def curve(*values: float) -> dict[int, float]:
    return dict(enumerate(values, start=1))


def test_a_plateau_is_a_flat_end() -> None:
    rising, flat = [0.5 + 0.001 * at for at in range(100)], [0.9 - 0.4 * 0.9**at for at in range(100)]
    assert not has_settled([curve(*rising)], 0.005)  # a point in the last tenth
    assert has_settled([curve(*flat)], 0.005)
    assert not has_settled([curve(*flat), curve(*(2 * value for value in rising))], 0.005)  # of the mean over seeds
    assert has_settled([curve(*rising)], 0.0101)
    assert not has_settled([], 1.0)
    assert not has_settled([{1: 0.5}], 1.0)  # a single round tells nothing


def test_the_level_of_a_paper() -> None:
    """Its figure to half the gain; or its plateau, within 3 points, flat to half the gain under both methods."""
    rising, flat = [[curve(*(0.5 + slope * at for at in range(100)))] for slope in (0.001, 0.0001)]
    assert is_level(-0.005, 0.011, 1.0, [rising, rising])
    assert not is_level(0.006, 0.011, 1.0, [rising, flat])
    assert is_level(0.006, 0.011, 1.0, [flat, flat])
    assert not is_level(0.006, 0.0018, 1.0, [flat, flat])  # not as flat as half that gain
    assert not is_level(0.031, 0.011, 1.0, [flat, flat])  # another plateau than the paper's
    assert is_level(0.031, -0.011, 1.1, [flat, flat])
    assert is_level(None, 0.011, 1.0, [flat, flat])
    assert not is_level(None, 0.011, 1.0, [flat, rising])


def results(gain: float, baseline: float = 0.8) -> StudyResults:
    runs = []
    for rule, more in (("FedAvg", 0.0), ("FedAvg, masked", gain)):
        for data in ("mnist", "fmnist"):
            for seed in (0, 13):
                high = baseline + more + seed / 1000
                runs.append(study_run(seed, {"test/acc": dict.fromkeys(range(1, 21), high)}, rule=rule, data_set=data))
    return StudyResults("two_rules", "cpu", tuple(runs))


@pytest.mark.parametrize(
    ("gain", "report", "word"),
    [
        (0.06, {"gain": 0.05}, "ahead"),
        (0.02, {"gain": 0.05}, "ahead by less than g"),
        (0.0, {"gain": 0.05}, "level"),
        (-0.02, {"gain": 0.05}, "behind"),
        (0.02, {"gain": 0.05, "learned": 0.9}, "nothing learned"),
        (0.02, {}, None),
    ],
)
def test_a_table_judges_the_smallest_gain_of_interest(gain: float, report: dict[str, float], word: str | None) -> None:
    table = study_table(some_study(**report), results(gain))
    words = [cell.verdict and cell.verdict.word for cell in table.cells.values() if cell.difference]
    assert words == [word, word]
    assert isinstance(Report().gain, type(None))


def test_equal_cells_are_no_test_and_the_same_two_cells_are_one() -> None:
    runs = [*results(0.0).runs]
    unequal = [
        study_run(
            seed, {"test/acc": {1: 0.8 + seed / 1000 + 0.01 * (seed == 13)}}, rule="FedAvg, masked", data_set=name
        )
        for name in ("mnist", "fmnist")
        for seed in (0, 13)
    ]
    equal = study_table(some_study(), StudyResults("two_rules", "cpu", tuple(runs)))
    assert all(math.isnan(cell.p_holm) for cell in equal.cells.values())
    kept = [run for run in runs if run.axes["rule"] == "FedAvg"]
    table = study_table(some_study(), StudyResults("two_rules", "cpu", (*kept, *unequal)))
    tested = [cell for cell in table.cells.values() if cell.difference]
    assert len(tested) == 2
    assert [cell.p_holm for cell in tested] == [cell.difference and cell.difference.p_value for cell in tested]


def test_cells_with_no_pairs_and_cells_that_diverged_are_no_tests() -> None:
    """One setting is tested, beside one with a seed on each side and one that is lost: its p-value stays as it is."""
    accuracies = {0: (0.8, 0.82), 13: (0.8, 0.83)}
    whole = [
        study_run(seed, {"test/acc": {1: value}}, rule=rule, data_set="mnist")
        for seed, pair in accuracies.items()
        for rule, value in zip(("FedAvg", "FedAvg, masked"), pair, strict=True)
    ]
    base = [study_run(seed, {"test/acc": {1: 0.7 + seed / 100}}, rule="FedAvg", data_set="fmnist") for seed in (0, 13)]
    for others in (
        [study_run(13, {"test/acc": {1: 0.9}}, rule="FedAvg, masked", data_set="fmnist")],
        [study_run(seed, {"test/acc": {1: math.nan}}, rule="FedAvg, masked", data_set="fmnist") for seed in (0, 13)],
    ):
        table = study_table(some_study(), StudyResults("two_rules", "cpu", (*whole, *base, *others)))
        tested, empty = (cell for cell in table.cells.values() if cell.difference)
        assert tested.difference is not None
        assert tested.p_holm == tested.difference.p_value < 1
        assert math.isnan(empty.p_holm)


@pytest.mark.parametrize(("learned", "word"), [(1.0, "ahead"), (0.5, "nothing learned")])
def test_less_is_better_of_a_loss(learned: float, word: str) -> None:
    runs = [replace(run, curves={"val/loss": run.curves["test/acc"]}) for run in results(-0.02).runs]
    study = some_study(metric=["val/loss"], gain=-0.01, learned=learned)
    table = study_table(study, StudyResults("two_rules", "cpu", tuple(runs)))
    assert [cell.verdict.word for cell in table.cells.values() if cell.verdict] == [word, word]


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
