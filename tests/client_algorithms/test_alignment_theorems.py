"""What FedGA, SCAFFOLD and linear scaling do to second order (Dandi, Barba, Jaggi, AAAI 2022: theorems 4, 5, A.2)."""

from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from torch.optim import SGD

from lightning_fed.aggregators import FedAvg
from lightning_fed.client_algorithms import FedGA, LinearScaling, StatelessSCAFFOLD
from tests.client_algorithms.client_runs import fit
from tests.client_algorithms.known_clients import Logistic, Problem, Quadratic

SIZES, STEPS = (6, 2, 8, 5), 5
PROBLEMS = pytest.mark.parametrize("problem", [Quadratic(SIZES), Logistic(SIZES)], ids=["quadratic", "logistic"])
WEIGHTINGS = pytest.mark.parametrize("weighting", ["samples", "uniform"])
SCALES = (1e-2, 1e-3, 1e-4)


def after(problem: Problem, lr: float, *algorithms: Any, weighting: Any = "uniform", steps: int = STEPS) -> np.ndarray:
    """The model after one round of full batches."""
    options: dict[str, Any] = {"batch_size": 8, "local_steps": steps, "optimizer": partial(SGD, lr=lr)}
    return fit(problem, FedAvg(weighting=weighting), *algorithms, **options).weights[0]


def regularizer_gradient(problem: Problem, weighting: str) -> np.ndarray:
    """∇ Σ p_i ‖∇f_i - g̅‖² at the start, from the clients' Hessians."""
    p = np.array(SIZES) / sum(SIZES) if weighting == "samples" else np.full(4, 0.25)
    gradients = np.array([problem.full(problem.start, i) for i in range(4)])
    hessians = np.array([problem.hessian(problem.start, i) for i in range(4)])
    apart = gradients - p @ gradients
    around = hessians - np.tensordot(p, hessians, 1)
    return 2 * np.einsum("i,ijk,ik->j", p, around, apart)


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def expect_linear(errors: list[float]) -> None:
    """About .1, .01 and .001: without the term the error is 1, with a wrong factor it stays."""
    assert errors[0] < 0.25
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.2)
    assert errors[1] / errors[2] == pytest.approx(10, rel=0.02)


@PROBLEMS
def test_the_hessians_are_the_gradients_derivatives(problem: Problem) -> None:
    for i in range(4):
        for axis, column in zip(np.eye(len(problem.start)), problem.hessian(problem.start, i).T, strict=True):
            ahead, behind = (problem.full(problem.start + step * axis, i) for step in (1e-5, -1e-5))
            np.testing.assert_allclose((ahead - behind) / 2e-5, column, atol=1e-8)


@PROBLEMS
@WEIGHTINGS
def test_theorem_4(problem: Problem, weighting: str) -> None:
    """FedGA - FedAvg = -(αβK/2) ∇ Σ p_i ‖∇f_i - g̅‖² as α = β -> 0."""
    slope, errors = regularizer_gradient(problem, weighting), []
    for s in SCALES:
        aligned, plain = (after(problem, s, *more, weighting=weighting) for more in ([FedGA(s)], []))
        errors.append(error(aligned - plain, -s * s * STEPS / 2 * slope))
    expect_linear(errors)


def test_theorem_4_needs_a_small_step_too() -> None:
    """With α fixed and β -> 0 the error stays: the theorem's O(αβ²) leaves out a term of O(α²β)."""
    problem, lr, errors = Quadratic(SIZES), 0.1, []
    for beta in (1e-2, 1e-3, 1e-4):
        moved = after(problem, lr, FedGA(beta)) - after(problem, lr)
        errors.append(error(moved, -lr * beta * STEPS / 2 * regularizer_gradient(problem, "uniform")))
    assert min(errors) > 0.1
    assert errors[-1] == pytest.approx(errors[0], rel=0.05)


@PROBLEMS
@WEIGHTINGS
def test_theorem_5(problem: Problem, weighting: str) -> None:
    """SCAFFOLD - FedAvg = -(α² K (K - 1) / 4) ∇ Σ p_i ‖∇f_i - g̅‖² as α -> 0."""
    slope, errors = regularizer_gradient(problem, weighting), []
    for s in SCALES:
        corrected, plain = (after(problem, s, *more, weighting=weighting) for more in ([StatelessSCAFFOLD()], []))
        errors.append(error(corrected - plain, -s * s * STEPS * (STEPS - 1) / 4 * slope))
    expect_linear(errors)


@PROBLEMS
def test_theorem_5_for_one_step(problem: Problem) -> None:
    """K = 1: corrections cancel in the mean, and SCAFFOLD is FedAvg."""
    corrected = after(problem, 0.1, StatelessSCAFFOLD(), weighting="samples", steps=1)
    np.testing.assert_allclose(corrected, after(problem, 0.1, weighting="samples", steps=1), rtol=0, atol=1e-13)


@PROBLEMS
def test_linear_scaling_is_sequential_descent_to_second_order(problem: Problem) -> None:
    """Averaged over the order of the clients; the plain step of n times the size is so to first order alone."""
    errors = []
    for s in SCALES:
        ends = []
        for order in permutations(range(4)):
            w = problem.start
            for i in order:
                w = w - s * problem.full(w, i)
            ends.append(w)
        plain = problem.start - s * sum(problem.full(problem.start, i) for i in range(4))
        errors.append(error(after(problem, s, LinearScaling(), steps=1) - plain, np.mean(ends, axis=0) - plain))
    expect_linear(errors)
