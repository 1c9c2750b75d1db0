import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import integrate, special

from lightning_fed.lab.studies import comparison
from lightning_fed.lab.studies.comparison import average_ranks, holm_adjusted, paired_difference

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
