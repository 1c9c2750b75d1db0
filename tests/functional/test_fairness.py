"""What clients count for by their losses, from the formulas in naive arithmetic."""

from itertools import chain, combinations

import numpy as np
import pytest

from lightning_fed.functional import project_onto_simplex, term_weights

LOSSES = np.array([0.5, 2.0, 0.25, 1.0])
SHARES = np.array([0.125, 0.25, 0.5, 0.125])


@pytest.mark.parametrize("t", [-2.0, 0.5, 3.0])
def test_tilted_weights_are_the_quotient_of_exponentials(t: float) -> None:
    expected = SHARES * np.exp(t * LOSSES) / (SHARES * np.exp(t * LOSSES)).sum()
    np.testing.assert_allclose(term_weights(LOSSES, SHARES, t), expected, rtol=1e-14)


def test_tilted_weights_at_their_limits() -> None:
    np.testing.assert_allclose(term_weights(LOSSES, SHARES, 0.0), SHARES, rtol=1e-15)
    np.testing.assert_allclose(term_weights(LOSSES, SHARES, 1e-13), SHARES, rtol=1e-12)
    np.testing.assert_allclose(term_weights(LOSSES, SHARES, 1e5), [0, 1, 0, 0], atol=1e-300)
    np.testing.assert_allclose(term_weights(LOSSES, SHARES, -1e5), [0, 0, 1, 0], atol=1e-300)
    moved = term_weights(LOSSES + 2.0**20, SHARES, 2.0)
    np.testing.assert_allclose(moved, term_weights(LOSSES, SHARES, 2.0), rtol=1e-12)


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
