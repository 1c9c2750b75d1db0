"""How fast masked averaging converges if masks are drawn (Tenison et al., TMLR 2023, proposition 4.8)."""

import numpy as np
import pytest

from tests.theory.random_masks import BEST, GAP, SMOOTHNESS, START, STRENGTHS, TARGETS, expected, trained

ALPHAS = np.array([1.0, 0.5, 0.25, 0.125, 0.0625])
STEPS, SIGMA = 4, 1.0
RATES = np.geomspace(1e-4, 0.5, 30) / STEPS
TIMES = np.array([100, 1000, 10_000])


@pytest.fixture(scope="module")
def tuned() -> np.ndarray:
    """The mean of E ‖∇f(w_t)‖² over T rounds at the best local rate, shape (T, α)."""
    sums = expected(ALPHAS[:, None], RATES, STEPS, SIGMA, int(TIMES[-1])).cumsum(axis=0)[TIMES - 1]
    return (sums / TIMES[:, None, None]).min(axis=2)


def test_moments_are_those_of_a_run_of_the_package() -> None:
    """With 2,000 coordinates of each chance, so that their mean is an expectation to a few percent."""
    chances = np.array([1.0, 0.5, 0.2])
    found = trained(np.repeat(chances, 2000), 0.1, 3, 0.5, 30).reshape(30, 3, 2000).mean(axis=2)
    np.testing.assert_allclose(found, expected(chances, 0.1, 3, 0.5, 30), rtol=0.1)


def test_the_rate_in_rounds(tuned: np.ndarray) -> None:
    """1/√T, which no rate without noise would be, and 1/T as well while T is small."""
    hundred, ten_thousand = [0.0206, 0.0304, 0.0468, 0.0793, 0.1384], [0.00185, 0.00263, 0.00375, 0.00538, 0.00772]
    np.testing.assert_allclose(tuned[[0, 2]], [hundred, ten_thousand], rtol=0.01)
    slopes = np.diff(np.log(tuned), axis=0) / np.log(10)
    assert slopes[1, :2] == pytest.approx([-0.51, -0.516], abs=0.003)
    assert (slopes[0] < slopes[1]).all()
    assert (abs(slopes[1] + 0.5) < 0.05).all()


def test_the_bound_of_proposition_4_8(tuned: np.ndarray) -> None:
    """(1/α) √(L σ² F_0 / (K T)) + L F_0 / (α² T), with a constant of 1."""
    bound = np.sqrt(SMOOTHNESS * SIGMA**2 * GAP / STEPS / TIMES[:, None]) / ALPHAS
    bound = bound + SMOOTHNESS * GAP / (ALPHAS**2 * TIMES[:, None])
    shares = tuned / bound
    assert shares.max() < 0.7
    assert shares.min() > 0.1


def test_the_bound_is_loose_in_alpha(tuned: np.ndarray) -> None:
    """What counts is α T: a mask that lets through a share α takes 1/α times the rounds, not 1/α²."""
    slope = np.polyfit(np.log(ALPHAS), np.log(tuned[-1]), 1)[0]
    assert slope == pytest.approx(-0.511, abs=0.005)


def test_the_least_chance_counts_and_not_the_mean() -> None:
    """Half of the coordinates at 0.95 and half at 0.05 are slower than all at their mean, 0.5."""
    even, often, seldom = expected(np.array([[0.5], [0.95], [0.05]]), RATES, STEPS, SIGMA, 1000).mean(axis=0)
    together = ((often + seldom) / 2).min() / even.min()
    assert together == pytest.approx(2.46, abs=0.01)
    assert seldom.min() / 2 < (often + seldom).min() / 2 < seldom.min()


@pytest.mark.parametrize("steps", [1, 4, 16])
@pytest.mark.parametrize("sigma", [0.0, 1.0, 10.0])
def test_the_inequality_before_the_rate(steps: int, sigma: float) -> None:
    """8 F_0 / (α η K T) + 80 L η σ² / α for η < 0.001 α / (K L): by the proof for K > 1, in numbers for K = 1 too."""
    at = np.array([START, BEST, 2 * BEST - START])[:, None]
    variance = sigma**2 + (STRENGTHS * (at - TARGETS)).var(axis=1).max()
    for share in (1.0, 0.1):
        lr = share * 0.000999 * ALPHAS / (steps * SMOOTHNESS)
        means = expected(ALPHAS, lr, steps, sigma, 1000).cumsum(axis=0)
        for rounds in (1, 30, 1000):
            bound = 8 * GAP / (ALPHAS * lr * steps * rounds) + 80 * SMOOTHNESS * lr * variance / ALPHAS
            assert (means[rounds - 1] / rounds <= 0.2 * bound).all()
