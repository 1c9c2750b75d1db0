"""Rules for updates that pull against each other, against NumPy, SciPy and what they promise."""

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from lightning_fed.functional import (
    cagrad_weights,
    combine_rows,
    conflicts,
    fedexp_factor,
    least_norm,
    mgda_weights,
    pcgrad_weights,
    ties_mean,
)

SHARES = np.array([0.1, 0.3, 0.2, 0.4])


def cohort(clients: int, size: int, seed: int = 0, lean: float = 0.5) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(clients, size)) + lean * rng.normal(size=size)


def by_scipy(goal: Any, start: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    one = {"type": "eq", "fun": lambda weights: weights.sum() - 1}
    bounds = list(zip(low, high, strict=True))
    return minimize(goal, start, method="SLSQP", bounds=bounds, constraints=one, options={"ftol": 1e-15}).x


# The shortest mean


@pytest.mark.parametrize("reach", [0.0, 0.05, 0.2, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_shortest_mean_within_bounds_is_that_of_scipy(reach: float, seed: int) -> None:
    rows = cohort(4, 7, seed)
    found = least_norm(rows @ rows.T, SHARES, reach=reach)
    low, high = np.maximum(SHARES - reach, 0), np.minimum(SHARES + reach, 1)
    assert found.sum() == pytest.approx(1, abs=1e-14)
    assert (found >= low - 1e-15).all()
    assert (found <= high + 1e-15).all()
    other = by_scipy(lambda weights: ((weights @ rows) ** 2).sum(), SHARES, low, high)
    np.testing.assert_allclose(found @ rows, other @ rows, rtol=0, atol=1e-6)
    assert ((found @ rows) ** 2).sum() <= ((other @ rows) ** 2).sum() + 1e-12
    if reach == 0:
        assert np.array_equal(found, SHARES)


@pytest.mark.parametrize(("clients", "size"), [(2, 3), (10, 4), (10, 100), (40, 100), (40, 20)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_nothing_is_gained_by_any_exchange(clients: int, size: int, scale: float) -> None:
    """The conditions of optimality: no client's slope is below that of one with weight to give."""
    rows = scale * cohort(clients, size)
    start = np.full(clients, 1 / clients)
    weights = least_norm(rows @ rows.T, start)
    slope = rows @ (weights @ rows)
    assert slope[weights > 1e-12].max() - slope.min() < 1e-10 * (rows**2).sum(axis=1).max()


def test_the_shortest_mean_of_two_is_that_of_the_formula() -> None:
    rows = cohort(2, 5)
    apart = rows[0] - rows[1]
    first = np.clip(-(rows[1] @ apart) / (apart @ apart), 0, 1)
    np.testing.assert_allclose(least_norm(rows @ rows.T, np.array([0.5, 0.5])), [first, 1 - first], rtol=0, atol=1e-10)


def test_the_shortest_mean_of_updates_that_cancel_is_zero_and_ends() -> None:
    rows = np.concatenate([cohort(3, 5), -cohort(3, 5)])
    weights = least_norm(rows @ rows.T, np.array([0.5, 0.1, 0.1, 0.1, 0.1, 0.1]))
    assert np.linalg.norm(weights @ rows) < 1e-10


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0])
def test_mgda_where_nothing_is_left_to_gain_gives_its_weights(epsilon: float) -> None:
    """A mistake of others: an assertion fails at convergence, where clients agree or their directions cancel."""
    row, lengths = cohort(1, 6)[0], np.array([1.0, 2.0, 0.5, 3.0])
    for signs, shares in ((np.ones(4), SHARES), (np.array([1, -1, 1, -1]), np.full(4, 0.25))):
        rows = (signs * lengths)[:, None] * row / np.linalg.norm(row)
        weights = mgda_weights(rows @ rows.T, shares, epsilon)
        np.testing.assert_allclose(weights * lengths, shares, rtol=0, atol=1e-12)
        assert np.linalg.norm(weights @ rows) == pytest.approx(abs(shares @ signs), abs=1e-12)


# FedMGDA+


def test_mgda_without_freedom_is_the_mean_of_directions() -> None:
    rows = cohort(4, 6) * np.array([[1e-3], [1.0], [50.0], [7.0]])
    step = mgda_weights(rows @ rows.T, SHARES, 0.0) @ rows
    np.testing.assert_allclose(step, SHARES @ (rows / np.linalg.norm(rows, axis=1)[:, None]), rtol=0, atol=1e-12)


def test_mgda_free_lengthens_no_update_and_helps_every_client() -> None:
    """Its step has an inner product of at least its own square with every direction."""
    rows = cohort(6, 30, lean=0.0)
    step = mgda_weights(rows @ rows.T, np.full(6, 1 / 6), 1.0) @ rows
    along = rows @ step / np.linalg.norm(rows, axis=1)
    assert (along > step @ step - 1e-12).all()
    assert step @ step < 1


def test_mgda_with_the_bound_left_out_is_another_rule() -> None:
    """A mistake of others: without ε every weight is free, and most clients may get none."""
    rows = cohort(4, 6)
    gram = rows @ rows.T
    bounded, free = mgda_weights(gram, SHARES, 0.05), mgda_weights(gram, SHARES, 1.0)
    weights = bounded * np.sqrt(gram.diagonal())
    assert (abs(weights - SHARES) <= 0.05 + 1e-12).all()
    assert abs(bounded - free).max() > 0.05


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0])
def test_mgda_leaves_out_an_update_of_zero_instead_of_dividing_by_it(epsilon: float) -> None:
    """A mistake of others: NaN for a client that stood still; and its 0 must not pass for the shortest direction."""
    rows = cohort(4, 6)
    rows[1] = 0
    weights = mgda_weights(rows @ rows.T, SHARES, epsilon)
    assert weights[1] == 0
    others = mgda_weights(rows[[0, 2, 3]] @ rows[[0, 2, 3]].T, SHARES[[0, 2, 3]] / 0.7, epsilon)
    np.testing.assert_allclose(weights[[0, 2, 3]], others, rtol=0, atol=1e-14)
    assert np.array_equal(mgda_weights(np.zeros((4, 4)), SHARES, epsilon), np.zeros(4))


# PCGrad


def every_order(clients: int) -> np.ndarray:
    return np.array([[j for j in range(clients) if j != i] for i in range(clients)])


def test_pcgrad_of_two_by_hand() -> None:
    rows = np.array([[1.0, 0.0], [-1.0, 1.0]])
    weights = pcgrad_weights(rows @ rows.T, np.array([0.5, 0.5]), every_order(2))
    # (1, 0) less -1/2 (-1, 1) is (1/2, 1/2); (-1, 1) less -1 (1, 0) is (0, 1).
    np.testing.assert_allclose(weights @ rows, [0.25, 0.75], rtol=0, atol=1e-15)


def test_pcgrad_projects_by_updates_as_they_came_and_in_order() -> None:
    rows = cohort(5, 4, seed=3, lean=0.0)
    shares, orders = np.full(5, 0.2), every_order(5)
    steps = []
    for given in (orders, orders[:, ::-1]):
        step = np.zeros(4)
        for own, order in zip(rows, given, strict=True):
            for other in rows[order]:
                own = own - min(own @ other, 0) / (other @ other) * other
            step += own / 5
        found = pcgrad_weights(rows @ rows.T, shares, given) @ rows
        np.testing.assert_allclose(found, step, rtol=0, atol=1e-12)
        steps.append(step)
    assert abs(steps[0] - steps[1]).max() > 1e-3, "the order matters"


def test_pcgrad_without_conflicts_is_the_mean_to_the_bit() -> None:
    rows = abs(cohort(4, 6))
    rows[2] = 0
    assert np.array_equal(pcgrad_weights(rows @ rows.T, SHARES, every_order(4)), SHARES)


def test_pcgrad_of_one_client_is_that_client() -> None:
    assert pcgrad_weights(np.array([[2.0]]), np.ones(1), np.empty((1, 0), dtype=np.int64)).tolist() == [1.0]


# CAGrad, and so FedOMG


def step_of(rows: np.ndarray, kappa: float, shares: np.ndarray = SHARES) -> np.ndarray:
    return cagrad_weights(rows @ rows.T, shares, kappa) @ rows


@pytest.mark.parametrize("kappa", [1e-6, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("seed", range(5))
def test_cagrad_is_the_best_step_within_reach_of_the_mean(kappa: float, seed: int) -> None:
    """max min_i ⟨δ_i, u⟩ over ‖u - ḡ‖ <= κ‖ḡ‖ has no gap to its dual, min ⟨g_γ, ḡ⟩ + κ‖ḡ‖‖g_γ‖, which bounds it."""
    rows = cohort(4, 7, seed)
    mean = SHARES @ rows
    length, step = np.linalg.norm(mean), step_of(rows, kappa)
    assert np.linalg.norm(step - mean) == pytest.approx(kappa * length, rel=1e-9)
    point = (step - mean) / (kappa * length)  # g_γ / ‖g_γ‖
    weights = np.linalg.lstsq(rows.T, point, rcond=None)[0]
    weights = weights.clip(min=0) / weights.clip(min=0).sum()
    bound = weights @ rows @ mean + kappa * length * np.linalg.norm(weights @ rows)
    assert (rows @ step).min() == pytest.approx(bound, rel=1e-9, abs=1e-10)


@pytest.mark.parametrize("seed", range(3))
def test_cagrad_agrees_with_scipy(seed: int) -> None:
    rows = cohort(4, 7, seed)
    mean = SHARES @ rows
    length = np.linalg.norm(mean)
    best = by_scipy(
        lambda gamma: gamma @ rows @ mean + 0.5 * length * np.linalg.norm(gamma @ rows),
        SHARES, np.zeros(4), np.ones(4),
    )  # fmt: skip
    expected = mean + 0.5 * length * (best @ rows) / np.linalg.norm(best @ rows)
    np.testing.assert_allclose(step_of(rows, 0.5), expected, rtol=0, atol=1e-5)


def test_cagrad_without_reach_is_the_weighted_mean() -> None:
    """A mistake of others: with weights p_i and 1/n too, κ = 0 gives Δ/n."""
    rows = cohort(4, 7)
    assert np.array_equal(cagrad_weights(rows @ rows.T, SHARES, 0.0), SHARES)


def test_cagrad_where_zero_is_a_mean_of_updates_is_finite() -> None:
    """A mistake of others: g_γ / ‖g_γ‖ is 0/0 there."""
    rows = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    step = step_of(rows, 0.5, np.full(3, 1 / 3))
    assert np.isfinite(step).all()
    assert np.linalg.norm(step - rows.mean(axis=0)) <= 0.5 / 3 + 1e-9
    assert abs(step[0]) < 1e-6, "it may hurt neither of the two that are opposed"
    for still in (np.zeros((3, 2)), np.array([[1.0, 0.0], [-1.0, 0.0]])):
        assert not step_of(still, 0.5, np.full(len(still), 1 / len(still))).any()


@pytest.mark.parametrize(("rows", "expected"), [([1.0, -3.0], -0.5), ([1.0, 3.0], 3.0), ([2.0, -1.0, 5.0], 1.0)])
def test_cagrad_on_a_line_by_hand(rows: list[float], expected: float) -> None:
    """Opposed: the end of the reach where the one that is hurt is hurt least; agreed: the other end."""
    found = step_of(np.array(rows)[:, None], 0.5, np.full(len(rows), 1 / len(rows)))
    assert found == pytest.approx([expected], rel=1e-9)


@pytest.mark.parametrize("scale", [1e-8, 1e8])
def test_steps_scale_with_the_updates(scale: float) -> None:
    rows = cohort(4, 7)
    np.testing.assert_allclose(step_of(scale * rows, 0.5), scale * step_of(rows, 0.5), rtol=1e-9)


def best_on_a_circle(rows: np.ndarray, shares: np.ndarray, kappa: float) -> np.ndarray:
    """Looks for the step in the plane by its angle, ever closer."""
    mean, around, width = shares @ rows, 0.0, np.pi
    for _ in range(12):
        angles = around + np.linspace(-width, width, 1001)
        steps = mean + kappa * np.linalg.norm(mean) * np.stack([np.cos(angles), np.sin(angles)], axis=1)
        best = (steps @ rows.T).min(axis=1).argmax()
        around, width = angles[best], width / 100
    return steps[best]


@pytest.mark.parametrize("ratio", [1e-2, 1e-5, 1e-6, 1e-7, 1e-9, 1e-12, 1e-20, 1e-30])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_cagrad_is_as_good_for_an_update_that_is_far_shorter_than_the_others(ratio: float, scale: float) -> None:
    rows, shares = np.array([[1.0, 0.0], [-ratio, ratio]]), np.array([0.5, 0.5])
    found = step_of(scale * rows, 0.5, shares) / scale
    np.testing.assert_allclose(found, best_on_a_circle(rows, shares, 0.5), rtol=0, atol=1e-7)
    if ratio <= 1e-7:
        np.testing.assert_allclose(found, [0.3232233, 0.1767767], rtol=0, atol=1e-7)  # Δ + κ ‖Δ‖ (-1, 1) / √2
    three = np.array([[1.0, 0.3], [-ratio, ratio], [-ratio, -0.9 * ratio], [3e-4, -2e-4]])
    found = step_of(scale * three, 0.9, SHARES) / scale
    np.testing.assert_allclose(found, best_on_a_circle(three, SHARES, 0.9), rtol=0, atol=1e-7)


@pytest.mark.parametrize("seed", range(12))
def test_cagrad_of_lengths_of_any_magnitude(seed: int) -> None:
    """No client gains less than it could, in units of its own length."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(4, 2)) * 10.0 ** rng.uniform(-12, 5, size=(4, 1))
    step, best, mean = step_of(rows, 0.5), best_on_a_circle(rows, SHARES, 0.5), SHARES @ rows
    least, radius = rows[(rows @ step).argmin()], 0.5 * np.linalg.norm(mean)
    assert least @ step >= (rows @ best).min() - 1e-7 * np.linalg.norm(least) * radius
    assert np.linalg.norm(step - mean) <= radius * (1 + 1e-7)


def test_cagrad_of_updates_whose_mean_is_only_rounding_is_that_mean() -> None:
    rows = cohort(3, 7)
    rows[2] = -rows[:2].sum(axis=0) * (1 + 1e-16)
    assert np.array_equal(cagrad_weights(rows @ rows.T, np.full(3, 1 / 3), 0.5), np.full(3, 1 / 3))


# TIES


def test_ties_by_hand() -> None:
    updates = torch.tensor([[3.0, -0.1, 2.0, 0.0], [-1.0, -4.0, 1.0, 0.2], [2.0, 5.0, -0.3, 0.1]])
    # Half of them kept: (3, ., 2, .), (-1, -4, ., .) as 1 and 1 are equal also the third, (2, 5, ., .).
    assert ties_mean(updates, 0.5).tolist() == [2.5, 5.0, 1.5, 0.0]


def test_ties_takes_the_mean_over_those_that_agree_and_not_over_all() -> None:
    updates = torch.tensor([[1.0], [2.0], [-0.5], [0.0]])
    assert ties_mean(updates, 1.0).tolist() == [1.5]


def test_ties_elects_by_sums_and_a_tie_stands_still() -> None:
    assert ties_mean(torch.tensor([[1.0], [1.0], [-5.0]]), 1.0).tolist() == [-5.0]
    assert ties_mean(torch.tensor([[1.0], [1.0], [-2.0]]), 1.0).tolist() == [0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("values", [[0.1, 0.2, -0.1, -0.2], [0.1, 0.2, -0.3], [0.7, 0.1, -0.8], [0.3] * 3 + [-0.9]])
def test_ties_of_a_sum_that_is_only_rounding_stands_still_in_every_order(values: Any, scale: float, dtype: Any) -> None:
    for order in permutations(values):
        assert ties_mean(scale * torch.tensor(order, dtype=dtype)[:, None], 1.0).tolist() == [0.0]
        elected = scale * torch.tensor([*order, 1e-3], dtype=dtype)[:, None]
        assert ties_mean(elected, 1.0).item() > 0, "a small sum is one"


def test_ties_of_all_coordinates_and_clients_that_agree_is_the_mean() -> None:
    updates = torch.tensor(abs(cohort(5, 9)))
    torch.testing.assert_close(ties_mean(updates, 1.0), updates.mean(0), rtol=0, atol=1e-15)


def test_ties_keeps_at_least_one_coordinate_and_blocks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = torch.tensor(cohort(1, 11))
    assert ties_mean(updates, 1e-9).count_nonzero() == 1
    whole = ties_mean(torch.tensor(cohort(4, 11)), 0.3)
    monkeypatch.setattr(conflicts, "_COLUMNS", 4)
    assert torch.equal(ties_mean(torch.tensor(cohort(4, 11)), 0.3), whole)


# FedExP


def factor_of(rows: np.ndarray, epsilon: float) -> float:
    squares = torch.tensor((rows**2).sum(axis=1).mean())
    return fedexp_factor(torch.tensor(rows.mean(axis=0)), squares, epsilon).item()


def test_the_factor_of_fedexp_by_hand() -> None:
    rows = np.eye(6)  # Σ ‖δ_i‖² = 6, ‖Δ‖² = 1/6
    assert factor_of(rows, 0.0) == pytest.approx(3)
    assert factor_of(rows, 1 / 6) == pytest.approx(1.5)
    assert factor_of(np.ones((6, 2)), 0.0) == 1
    assert factor_of(np.zeros((6, 2)), 0.0) == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_rounding_leaves_of_updates_that_cancel_is_not_extrapolated(dtype: Any) -> None:
    rows = np.random.default_rng(0).normal(size=(3, 50)).astype(dtype)
    rows[2] = -rows[0] - rows[1]
    mean = (rows[0] + rows[2] + rows[1]) / 3
    assert mean.any()
    assert fedexp_factor(torch.tensor(mean), torch.tensor((rows.astype(float) ** 2).sum() / 3), 0.0) == 1
    rows[2] *= 1 + 1e-4
    assert factor_of(rows, 0.0) > 1e4


def test_without_a_fixed_epsilon_small_updates_are_extrapolated_as_large_ones() -> None:
    """A mistake of others: with ε of 1e-4 clients with a small learning rate train by FedAvg."""
    for scale in (1e-9, 1e-3, 1e3):
        assert factor_of(scale * np.eye(6), 0.0) == pytest.approx(3)
    assert factor_of(1e-3 * np.eye(6), 1e-4) == 1


def test_rows_are_combined_in_double_precision() -> None:
    rows, factors = torch.tensor(cohort(4, 7), dtype=torch.float32), torch.tensor(SHARES)
    found = combine_rows(rows, factors)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found, SHARES @ rows.double().numpy(), rtol=0, atol=1e-15)


def test_weights_that_are_not_exact_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    gram, start = np.diag([1.0, 2.0, 3.0]), np.full(3, 1 / 3)
    found = conflicts.least_norm(gram, start)
    np.testing.assert_allclose(found, np.array([6, 3, 2]) / 11, atol=1e-12)
    monkeypatch.setattr(conflicts, "_EXCHANGES", 1)
    with pytest.warns(UserWarning, match="The weights of 3 clients are not exact: 1 exchanges were not enough"):
        conflicts.least_norm(gram, start)
