"""What corrective gradient weights estimate and bound (Mousazadeh, Khodadadi, Salehi, 2023, eq. 2 to 12)."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed.aggregators import CGW
from lightning_fed.functional.server import corrective_weights
from tests.client_algorithms.client_runs import fit
from tests.client_algorithms.known_clients import Logistic

SIZES, CLIENTS = (6, 2, 8, 5), range(4)
PROBLEM = Logistic(SIZES)
CONSTRAINTS = pytest.mark.parametrize("constraint", ["shared", "per_client"])


@dataclass(frozen=True)
class Corrected:
    """One round of the package: where clients end, W_FedAvg, what is added to it, and the weights.

    Attributes:
        ends: W_i, shape (n, d).
        average: W_FedAvg, shape (d,).
        moved: ΔW, shape (d,).
        weights: x_i, shape (n,).
    """

    ends: np.ndarray
    average: np.ndarray
    moved: np.ndarray
    weights: np.ndarray

    @property
    def gradients(self) -> np.ndarray:
        """D_i = ∇L_i(W_i)."""
        return np.array([PROBLEM.full(end, i) for i, end in enumerate(self.ends)])

    @property
    def losses(self) -> np.ndarray:
        """L_i(W_i)."""
        return np.array([PROBLEM.loss(end, i) for i, end in enumerate(self.ends)])

    def changes(self, points: np.ndarray) -> np.ndarray:
        """L_i(w_i + ΔW) - L_i(w_i) for a point of each client."""
        return np.array([PROBLEM.loss(w + self.moved, i) - PROBLEM.loss(w, i) for i, w in enumerate(points)])

    @property
    def estimates(self) -> np.ndarray:
        """⟨D_i, ΔW⟩, eq. 4."""
        return self.gradients @ self.moved


@cache
def corrected(alpha: float, constraint: Any) -> Corrected:
    found = {}
    for a in (0.0, alpha):
        aggregator = CGW(a, constraint)
        tape = fit(PROBLEM, aggregator, batch_size=8, local_steps=5)
        found[a] = tape.weights[0]
    ends = np.array([PROBLEM.start + tape.updates[0][i] for i in CLIENTS])
    return Corrected(ends, found[0.0], found[alpha] - found[0.0], aggregator.corrective_weights.numpy())


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@CONSTRAINTS
def test_the_package_moves_by_the_weighted_gradients(constraint: str) -> None:
    """Eq. 3, and the sum of the estimates, eq. 6: -Σ x_i ⟨D_i, D⟩."""
    here = corrected(0.1, constraint)
    gradients = here.gradients
    np.testing.assert_allclose(here.moved, -here.weights @ gradients, atol=1e-15)
    assert here.estimates.sum() == pytest.approx(-here.weights @ (gradients @ gradients.sum(axis=0)), rel=1e-12)
    assert here.estimates.sum() < 0


@CONSTRAINTS
def test_the_estimate_of_each_client_at_its_own_model(constraint: str) -> None:
    """L_i(W_i + ΔW) - L_i(W_i) is ⟨D_i, ΔW⟩ but for O(α²)."""
    errors = []
    for alpha in (0.1, 0.01, 0.001):
        here = corrected(alpha, constraint)
        errors.append(relative(here.estimates, here.changes(here.ends)))
    assert errors[1] == pytest.approx({"shared": 0.0077, "per_client": 0.0093}[constraint], rel=0.01)
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.15)
    assert errors[1] / errors[2] == pytest.approx(10, rel=0.02)


@CONSTRAINTS
def test_the_estimate_is_not_made_where_the_step_is_taken(constraint: str) -> None:
    """ΔW is added to W_FedAvg, but D_i is the slope at W_i: however small α, part of the error stays."""
    errors = []
    for alpha in (0.1, 0.01, 0.001):
        here = corrected(alpha, constraint)
        errors.append(relative(here.estimates, here.changes(np.tile(here.average, (4, 1)))))
    assert errors[1] == pytest.approx(errors[2], rel=0.1)
    assert errors[2] == pytest.approx(0.34, abs=0.01)


def test_no_client_changes_by_more_than_its_share_to_first_order() -> None:
    """|ΔL_i| <= α L_i under the shared constraint (eq. 10 to 12), and nearly so in truth."""
    for alpha in (0.001, 0.01, 0.1, 1.0):
        here = corrected(alpha, "shared")
        shares = abs(here.estimates) / (alpha * here.losses)
        assert (shares.min(), shares.max()) == pytest.approx((0.235, 0.610), abs=0.001)
        assert (abs(here.changes(here.ends)) / (alpha * here.losses)).max() <= 1 + alpha


def test_the_bound_is_reached() -> None:
    """By clients that are alike, so that eq. 10 holds with <= and not with <; per client they exceed it √n times."""
    alike = Logistic((6, 6, 6, 6))
    alike.inputs, alike.targets = np.tile(alike.inputs[:6], (4, 1)), np.tile(alike.targets[:6], 4)
    alpha = 0.01
    cases: list[tuple[Any, float]] = [("shared", 1.0), ("per_client", 2.0)]
    for constraint, times in cases:
        plain, moved = (fit(alike, CGW(a, constraint), batch_size=8, local_steps=5) for a in (0.0, alpha))
        end = plain.weights[0]
        estimate = alike.full(end, 0) @ (moved.weights[0] - end)
        assert abs(estimate) == pytest.approx(times * alpha * alike.loss(end, 0), rel=1e-9)


def test_the_sum_of_losses_may_rise_where_the_step_is_taken() -> None:
    """Two clients, f_i = h_i (w - c_i)² / 2: one has arrived at c_1 = 0 (h = 10), one is half way to c_2 = 10 (h = 1).

    Only the second has a slope, so that the correction goes its way: the sum of the losses falls at the clients' own
    models, 0 and 5. At their mean, 2.5, it rises.
    """
    h, c, ends = (
        torch.tensor([10.0, 1.0]).double(),
        torch.tensor([0.0, 10.0]).double(),
        torch.tensor([0.0, 5.0]).double(),
    )
    slopes, losses = h * (ends - c), h * (ends - c) ** 2 / 2
    weights = corrective_weights(slopes[:, None] @ slopes[None], losses, 0.1, "per_client")
    moved = -float(weights @ slopes)
    assert moved > 0

    def change(points: torch.Tensor) -> float:
        return float((h * ((points + moved - c) ** 2 - (points - c) ** 2) / 2).sum())

    assert (change(ends), change(ends.mean() + 0 * ends)) == pytest.approx((-0.90625, 4.71875))
