"""What clients count for by their losses, from the formulas in exact or naive arithmetic."""

from fractions import Fraction
from itertools import chain, combinations

import numpy as np
import pytest

from lightning_fed.functional import project_onto_simplex, qfedavg_weights, term_weights

LOSSES_OF_CLIENTS = np.array([0.5, 2.0, 0.25, 1.0])
SQUARES = np.array([4.0, 0.0, 1.0, 9.0])
SHARES = np.array([0.125, 0.25, 0.5, 0.125])


@pytest.mark.parametrize("q", [1, 2, 3])
def test_qfedavg_is_the_quotient_of_the_paper(q: int) -> None:
    """In fractions: Σ p f^q L δ over Σ p (q f^{q-1} L² ‖δ‖² + L f^q)."""
    f, s, p = ([Fraction(x) for x in part.tolist()] for part in (LOSSES_OF_CLIENTS, SQUARES, SHARES))
    lip = Fraction(10)
    below = sum(p[i] * (q * f[i] ** (q - 1) * lip**2 * s[i] + lip * f[i] ** q) for i in range(4))
    expected = [float(p[i] * f[i] ** q * lip / below) for i in range(4)]
    np.testing.assert_allclose(qfedavg_weights(LOSSES_OF_CLIENTS, SQUARES, SHARES, q, 10.0), expected, rtol=1e-13)


def test_qfedavg_at_0_is_the_mean_and_overflows_for_no_q() -> None:
    np.testing.assert_allclose(qfedavg_weights(LOSSES_OF_CLIENTS, SQUARES, SHARES, 0.0, 10.0), SHARES, rtol=1e-15)
    for losses in (LOSSES_OF_CLIENTS * 1e80, LOSSES_OF_CLIENTS * 1e-80, np.zeros(4)):
        for q in (0.5, 20.0):
            weights = qfedavg_weights(losses, SQUARES, SHARES, q, 10.0)
            assert np.isfinite(weights).all()
            assert (weights >= 0).all()


def test_the_worst_served_client_counts_more_the_larger_q() -> None:
    parts = [qfedavg_weights(LOSSES_OF_CLIENTS, np.zeros(4), SHARES, q, 1.0)[1] for q in (0, 1, 2, 5)]
    assert parts == sorted(parts)
    assert parts[-1] > 0.95


@pytest.mark.parametrize("t", [-2.0, 0.5, 3.0])
def test_tilted_weights_are_the_quotient_of_exponentials(t: float) -> None:
    expected = SHARES * np.exp(t * LOSSES_OF_CLIENTS) / (SHARES * np.exp(t * LOSSES_OF_CLIENTS)).sum()
    np.testing.assert_allclose(term_weights(LOSSES_OF_CLIENTS, SHARES, t), expected, rtol=1e-14)


def test_tilted_weights_at_their_limits() -> None:
    np.testing.assert_allclose(term_weights(LOSSES_OF_CLIENTS, SHARES, 0.0), SHARES, rtol=1e-15)
    np.testing.assert_allclose(term_weights(LOSSES_OF_CLIENTS, SHARES, 1e-13), SHARES, rtol=1e-12)
    np.testing.assert_allclose(term_weights(LOSSES_OF_CLIENTS, SHARES, 1e5), [0, 1, 0, 0], atol=1e-300)
    np.testing.assert_allclose(term_weights(LOSSES_OF_CLIENTS, SHARES, -1e5), [0, 0, 1, 0], atol=1e-300)
    moved = term_weights(LOSSES_OF_CLIENTS + 2.0**20, SHARES, 2.0)
    np.testing.assert_allclose(moved, term_weights(LOSSES_OF_CLIENTS, SHARES, 2.0), rtol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_the_projection_is_the_nearest_of_those_on_every_face(seed: int) -> None:
    point = np.random.default_rng(seed).normal(size=5) * (1 + seed)
    faces = chain.from_iterable(combinations(range(5), count) for count in range(1, 6))
    nearest, least = point, np.inf
    for face in map(list, faces):
        other = np.zeros(5)
        other[face] = point[face] + (1 - point[face].sum()) / len(face)
        if (other >= 0).all() and ((other - point) ** 2).sum() < least:
            nearest, least = other, ((other - point) ** 2).sum()
    np.testing.assert_allclose(project_onto_simplex(point), nearest, atol=1e-14)


def test_a_point_on_the_simplex_stays() -> None:
    np.testing.assert_allclose(project_onto_simplex(SHARES), SHARES, atol=1e-16)
    assert project_onto_simplex(np.array([7.0])).tolist() == [1.0]
