"""Figures of membership attacks, against scikit-learn, counting, and closed forms."""

from itertools import product

import numpy as np
import pytest
import torch
from sklearn import metrics
from torch import Tensor

from lightning_fed.lab.attack.figures import (
    attack_figures,
    best_threshold,
    bootstrap_interval,
    client_means,
    confidences,
    logistic_scores,
    most_true,
    roc_curve,
)

LEVELS = (0.0, 0.01, 0.29, 1.0)


def scores(members: int, others: int, ties: bool, shift: float = 0.7) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(members)
    found = rng.normal(shift, 1, members), rng.normal(0, 1, others)
    drawn = [torch.tensor(np.round(each) if ties else each) for each in found]
    return drawn[0], drawn[1]


@pytest.mark.parametrize(("members", "others"), [(1, 1), (40, 100), (300, 250)])
@pytest.mark.parametrize("ties", [False, True])
def test_agrees_with_scikit_learn(members: int, others: int, ties: bool) -> None:
    inside, outside = scores(members, others, ties)
    labels = np.r_[np.ones(members), np.zeros(others)]
    joined = torch.cat([inside, outside]).numpy()
    accuracy, area, *rates = attack_figures(inside, outside, 0.5, LEVELS).tolist()
    assert accuracy == pytest.approx(metrics.balanced_accuracy_score(labels, joined >= 0.5), rel=1e-14)
    assert area == pytest.approx(metrics.roc_auc_score(labels, joined), rel=1e-14)
    false, true, thresholds = metrics.roc_curve(labels, joined, drop_intermediate=False)
    assert rates == pytest.approx([true[false <= level + 1e-12].max() for level in LEVELS], rel=1e-14)
    found = [each.numpy() for each in roc_curve(inside, outside)]
    for mine, theirs in zip(found, (false, true, thresholds), strict=True):
        np.testing.assert_allclose(mine, theirs[1:], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("ties", [False, True])
def test_the_best_threshold_is_that_of_trying_all(ties: bool) -> None:
    inside, outside = scores(30, 50, ties)
    tried = {
        float(t): ((inside >= t).double().mean() + (outside < t).double().mean()).item() / 2
        for t in torch.cat([inside, outside])
    }
    best = best_threshold(inside, outside)
    assert tried[best] == pytest.approx(max(tried.values()), rel=1e-14)
    assert attack_figures(inside, outside, best, ()).tolist()[0] == pytest.approx(tried[best], rel=1e-14)


def test_closed_forms() -> None:
    # Members 1, 3, ..., 2n - 1 beside others 0, 2, ..., 2n - 2: member i lies above i + 1 of them.
    n = 100
    inside = torch.arange(1, 2 * n, 2, dtype=torch.float64)
    _, area, *rates = attack_figures(inside, inside - 1, 0, LEVELS).tolist()
    assert area == pytest.approx((n + 1) / (2 * n), rel=1e-14)
    assert rates == pytest.approx([1 / n, 2 / n, 30 / n, 1], rel=1e-14)
    assert attack_figures(inside + 500, inside, 500, LEVELS).tolist() == [1.0] * 6
    # Constant scores say nothing: half right, and no threshold below all of them.
    same = torch.ones(n, dtype=torch.float64)
    assert attack_figures(same, same, 1.0, LEVELS).tolist() == [0.5, 0.5, 0, 0, 0, 1]


def test_the_area_of_normal_scores_is_known() -> None:
    # P(X > Y) of X ~ N(s, 1), Y ~ N(0, 1) is Φ(s / √2).
    inside, outside = scores(40_000, 40_000, ties=False, shift=0.3)
    expected = torch.distributions.Normal(0, 1).cdf(torch.tensor(0.3 / 2**0.5, dtype=torch.float64)).item()
    assert attack_figures(inside, outside, 0, ()).tolist()[1] == pytest.approx(expected, abs=0.008)


def test_intervals_of_the_bootstrap() -> None:
    inside, outside = scores(200, 200, ties=False)
    ends = bootstrap_interval(inside, outside, 0.35, (0.1,), 400, torch.Generator().manual_seed(1))
    figures = attack_figures(inside, outside, 0.35, (0.1,))
    assert ends.shape == (2, 3)
    assert (ends[0] < figures).all()
    assert (figures < ends[1]).all()
    again = bootstrap_interval(inside, outside, 0.35, (0.1,), 400, torch.Generator().manual_seed(1))
    assert torch.equal(ends, again)
    # The accuracy is a mean of two shares: its deviation is known, and the percentiles are those of a normal value.
    shares = [(inside >= 0.35).double().mean(), (outside < 0.35).double().mean()]
    deviation = (sum(p * (1 - p) / 200 for p in shares) / 4) ** 0.5
    assert (ends[1] - ends[0])[0].item() == pytest.approx(2 * 1.96 * float(deviation), rel=0.15)


def test_confidences_are_the_log_odds_of_the_own_label() -> None:
    logits = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 3, 0, 1, 2])
    own = logits.softmax(dim=1)[torch.arange(7), labels]
    torch.testing.assert_close(confidences(logits, labels), (own / (1 - own)).log(), rtol=1e-12, atol=0)
    # Losses of 0 in every bit are told apart all the same.
    sure = torch.tensor([[800.0, 0.0], [900.0, 0.0], [-800.0, 0.0]], dtype=torch.float64)
    assert confidences(sure, torch.zeros(3, dtype=torch.int64)).tolist() == [800.0, 900.0, -800.0]


@pytest.mark.slow
def test_the_logistic_regression_is_at_the_minimum_of_its_objective() -> None:
    generator = torch.Generator().manual_seed(0)
    inside = torch.randn(60, 3, dtype=torch.float64, generator=generator) + torch.tensor([0.8, 0.0, -0.3])
    outside = torch.randn(60, 3, dtype=torch.float64, generator=generator)
    joined = torch.cat([inside, outside])
    found = logistic_scores(inside, outside, joined)
    assert found.dtype == torch.float64
    # Log-odds are affine in the logits; with penalty |w|² / 2 the gradient of the loss in w is -w.
    standard = (joined - joined.mean(0)) / joined.std(0, correction=0)
    design = torch.cat([standard, torch.ones(120, 1, dtype=torch.float64)], dim=1)
    weights = torch.linalg.lstsq(design, found[:, None]).solution[:, 0]
    torch.testing.assert_close(design @ weights, found, rtol=0, atol=1e-10)
    residual = torch.cat([torch.ones(60), torch.zeros(60)]) - found.sigmoid()
    gradient = design.T @ residual
    torch.testing.assert_close(gradient, torch.cat([weights[:3], torch.zeros(1)]), rtol=0, atol=2e-3)


def test_a_constant_logit_is_no_obstacle() -> None:
    for inside, outside in product((torch.zeros(4, 2), torch.ones(4, 2)), repeat=2):
        assert logistic_scores(inside, outside, outside).isfinite().all()


def test_the_score_of_a_client_is_the_mean_of_its_samples() -> None:
    owners, drawn = torch.tensor([7, 2, 7, 4, 2, 7]), torch.tensor([1.0, 10.0, 3.0, -5.0, 20.0, 5.0]).double()
    assert client_means(drawn, owners).tolist() == [15.0, -5.0, 3.0]


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.0), (0.3, 1e-2), (2.0, 1e-3), (8.0, 1e-5), (2000.0, 0.0)])
def test_what_epsilon_allows_is_the_region_of_both_inequalities(epsilon: float, delta: float) -> None:
    false = torch.linspace(0, 1, 1001, dtype=torch.float64)
    most = most_true(false, epsilon, delta).numpy()
    # The largest t of a grid for which both worlds are as alike as (ε, δ) asks, for the test and for its complement.
    grid = np.linspace(0, 1, 20001)[:, None]
    factor, rate = np.exp(min(epsilon, 700.0)), false.numpy()
    fits = (grid <= factor * rate + delta + 1e-12) & (1 - rate <= factor * (1 - grid) + delta + 1e-12)
    np.testing.assert_allclose(most, np.where(fits, grid, 0).max(axis=0), atol=6e-5)
    best = (most + 1 - rate).max() / 2  # the balanced accuracy
    assert best == pytest.approx((1 + delta * np.exp(-epsilon)) / (1 + np.exp(-epsilon)), abs=1e-3)
    assert (most >= rate - 1e-12).all()


def test_a_gaussian_test_with_the_least_noise_stays_within_what_epsilon_allows() -> None:
    """One release with noise 1: ε of δ = 1e-3 by Balle and Wang (ICML 2018), and the power of Neyman and Pearson."""
    from scipy.optimize import brentq
    from scipy.stats import norm

    epsilon = brentq(lambda e: norm.cdf(0.5 - e) - np.exp(e) * norm.cdf(-0.5 - e) - 1e-3, 0, 20)
    false = np.linspace(1e-4, 1 - 1e-4, 500)
    power, most = norm.cdf(norm.ppf(false) + 1), most_true(torch.from_numpy(false), epsilon, 1e-3).numpy()
    assert (power <= most + 1e-12).all()
    assert (most - power).min() < 1e-4  # they touch
