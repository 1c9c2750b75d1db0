"""What SGD, GradAlign and a regularised descent do to second order (Dandi, Barba, Jaggi, AAAI 2022)."""

from collections.abc import Iterable
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from torch.optim import SGD

from lightning_fed.aggregators import FedAvg
from lightning_fed.client_algorithms import GradAlign
from tests.client_algorithms.client_runs import fit
from tests.client_algorithms.known_clients import Logistic, Quadratic
from tests.theory.waves import Waves

SIZES = (6, 2, 8, 5)
MADE = {"quadratic": partial(Quadratic, SIZES), "logistic": partial(Logistic, SIZES), "waves": Waves}
PROBLEMS = pytest.mark.parametrize("name", MADE)
# Minibatches of a sequence A: all once, two of them twice, and one alone.
SEQUENCES = pytest.mark.parametrize("sequence", [(0, 1, 2, 3), (0, 0, 1, 3, 3), (2,)], ids=["once", "twice", "one"])


def distance(one: np.ndarray, other: Any) -> float:
    return float(np.linalg.norm(one - other))


def mean_gradient(problem: Any, w: np.ndarray, sequence: Iterable[int]) -> np.ndarray:
    return np.mean([problem.full(w, i) for i in sequence], axis=0)


def slope_of_spread(problem: Any, w: np.ndarray, sequence: Iterable[int]) -> np.ndarray:
    """∇r_A, of r_A = (1/2K) Σ ‖∇f_a - ∇f_A‖², from Hessians."""
    gradients = np.array([problem.full(w, i) for i in sequence])
    hessians = np.array([problem.hessian(w, i) for i in sequence])
    apart, around = gradients - gradients.mean(axis=0), hessians - hessians.mean(axis=0)
    return np.einsum("ijk,ik->j", around, apart) / len(gradients)


def sgd(problem: Any, alpha: float, order: Iterable[int]) -> np.ndarray:
    w = problem.start
    for i in order:
        w = w - alpha * problem.full(w, i)
    return w


def descent(problem: Any, alpha: float, sequence: tuple[int, ...], beta: float = 0.0) -> np.ndarray:
    """As many steps as the sequence is long, on f_A + β r_A."""
    w = problem.start
    for _ in sequence:
        more = beta * slope_of_spread(problem, w, sequence) if beta else 0.0
        w = w - alpha * (mean_gradient(problem, w, sequence) + more)
    return w


def test_waves_have_the_constants_they_say() -> None:
    waves = Waves()
    for w in np.random.default_rng(1).normal(size=(20, 6)):
        hessians = np.array([waves.hessian(w, i) for i in range(4)])
        for axis, column in zip(np.eye(6), hessians[2].T, strict=True):
            np.testing.assert_allclose((waves.full(w + 1e-5 * axis, 2) - waves.full(w - 1e-5 * axis, 2)) / 2e-5, column,
                                       atol=1e-8)  # fmt: skip
        assert np.linalg.norm(hessians.mean(axis=0), 2) <= waves.smoothness + 1e-12
        ahead, behind = (slope_of_spread(waves, w + step * waves.turn[0], range(4)) for step in (1e-5, -1e-5))
        assert distance(ahead, behind) / 2e-5 <= waves.spread_smoothness + 1e-8
    bottom = waves.turn.T @ (waves.crests + np.pi)
    assert np.linalg.norm(mean_gradient(waves, bottom, range(4))) < 1e-12
    assert np.linalg.norm(np.mean([waves.hessian(bottom, i) for i in range(4)], 0), 2) == pytest.approx(
        waves.smoothness
    )


def test_lemma_1() -> None:
    """‖∇f(x + v) - ∇f(x) - ∇²f(x) v‖ <= (ρ/2) ‖v‖² for v of any length, and nearly that where the wave turns."""
    waves, rng, shares = Waves(), np.random.default_rng(0), []
    for length in (1e-3, 0.1, 1.0, 10.0):
        for _ in range(200):
            x, v = rng.normal(size=6), rng.normal(size=6)
            v *= length / np.linalg.norm(v)
            error = distance(waves.full(x + v, 1), waves.full(x, 1) + waves.hessian(x, 1) @ v)
            shares.append(error / (waves.inputs[1].max() / 2 * length**2))
    assert max(shares) <= 1
    highest = int(waves.inputs[1].argmax())
    x, v = waves.turn.T @ (waves.targets[1] + np.pi / 2), 0.01 * waves.turn[highest]
    error = distance(waves.full(x + v, 1), waves.full(x, 1) + waves.hessian(x, 1) @ v)
    assert 0.9999 < error / (waves.inputs[1].max() / 2 * 1e-4) <= 1


@PROBLEMS
@SEQUENCES
def test_theorem_1(name: str, sequence: tuple[int, ...]) -> None:
    """E[x_SGD - x_GD] = -(Kα²/2) ∇r_A + O(α³), over all orders of the minibatches."""
    problem: Any = MADE[name]()
    slope, left = slope_of_spread(problem, problem.start, sequence), []
    for alpha in (1e-2, 1e-3):
        mean = np.mean([sgd(problem, alpha, order) for order in permutations(sequence)], axis=0)
        moved = mean - descent(problem, alpha, sequence)
        left.append(distance(moved, -len(sequence) / 2 * alpha**2 * slope))
        if len(sequence) > 1:
            assert left[-1] < 12 * alpha * np.linalg.norm(moved)
    if len(sequence) == 1:
        assert max(left) < 1e-15
    else:
        assert left[0] / left[1] == pytest.approx(1000, rel=0.1)  # what is left is of the third order


@PROBLEMS
def test_theorem_1_is_about_the_mean_of_the_orders(name: str) -> None:
    """One order alone leaves a term of the second order, as large as that of the theorem or larger."""
    problem: Any = MADE[name]()
    slope = slope_of_spread(problem, problem.start, range(4))
    alpha, expected = 1e-3, -2 * 1e-6 * slope
    orders = [sgd(problem, alpha, order) - descent(problem, alpha, (0, 1, 2, 3)) for order in permutations(range(4))]
    far = [distance(moved, expected) / np.linalg.norm(expected) for moved in orders]
    assert np.mean(far) > 1
    forth_and_back = (orders[0] + orders[-1]) / 2
    assert distance(forth_and_back, expected) < 0.05 * np.linalg.norm(expected)


@PROBLEMS
def test_descent_on_the_regularised_objective_stands_for_sgd(name: str) -> None:
    """Appendix A.4: K steps on f_A + (α/2) r_A end where SGD does in the mean, but for O(α³)."""
    problem: Any = MADE[name]()
    sequence, left, plain = (0, 1, 2, 3), [], []
    for alpha in (1e-2, 1e-3):
        mean = np.mean([sgd(problem, alpha, order) for order in permutations(sequence)], axis=0)
        left.append(distance(mean, descent(problem, alpha, sequence, beta=alpha / 2)))
        plain.append(distance(mean, descent(problem, alpha, sequence)))
    assert left[0] / left[1] == pytest.approx(1000, rel=0.1)
    assert plain[0] / plain[1] == pytest.approx(100, rel=0.1)


@PROBLEMS
def test_theorem_2(name: str) -> None:
    """One step of GradAlign less one of descent is -αβ ∇r + O(αβ²): α stays, β -> 0."""
    problem: Any = MADE[name]()
    alpha, slope = 0.1, slope_of_spread(problem, problem.start, range(4))
    options: dict[str, Any] = {"batch_size": 8, "local_steps": 1, "optimizer": partial(SGD, lr=alpha)}
    plain = fit(problem, FedAvg(weighting="uniform"), **options).weights[0]
    left = []
    for beta in (1e-2, 1e-3):
        aligned = fit(problem, FedAvg(weighting="uniform"), GradAlign(beta), **options).weights[0]
        left.append(distance(aligned - plain, -alpha * beta * slope))
        assert left[-1] < 0.3 * distance(aligned, plain)
    if name == "quadratic":
        assert max(left) < 1e-15  # the Hessians are the same everywhere
    else:
        assert left[0] / left[1] == pytest.approx(100, rel=0.1)
