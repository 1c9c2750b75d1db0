"""When one step of GradAlign lowers f + β r (Dandi, Barba, Jaggi, AAAI 2022, theorem 3 and appendix A.1)."""

from functools import partial

import numpy as np
import pytest
from torch.optim import SGD

from lightning_fed.aggregators import FedAvg
from lightning_fed.client_algorithms import GradAlign
from tests.client_algorithms.client_runs import fit
from tests.theory.waves import Waves

WAVES = Waves()
ALPHA = 1 / (2 * WAVES.smoothness)  # the largest of the theorem
POINTS = np.random.default_rng(3).normal(size=(20, 6)) * 3
BETAS = np.geomspace(1e-3, 30, 600)


def change(w: np.ndarray, beta: float, alpha: float = ALPHA) -> float:
    """How much a step adds to f + β r."""
    return WAVES.surrogate(w + WAVES.step(w, alpha, beta), beta) - WAVES.surrogate(w, beta)


def is_covered(w: np.ndarray, beta: float, alpha: float = ALPHA) -> bool:
    """β < L_1 / L_2 and β² < (L_1/ρ) ‖x_new - x‖ / r(x), the sufficient condition of the proof."""
    length = np.linalg.norm(WAVES.step(w, alpha, beta))
    bound = WAVES.smoothness / WAVES.rho * length / WAVES.spread(w)
    return bool(beta < WAVES.smoothness / WAVES.spread_smoothness and beta**2 < bound)


def test_the_step_is_that_of_the_package() -> None:
    for beta in (0.05, 0.8):
        tape = fit(WAVES, FedAvg(weighting="uniform"), GradAlign(beta), batch_size=1, local_steps=1,
                   optimizer=partial(SGD, lr=ALPHA))  # fmt: skip
        np.testing.assert_allclose(tape.weights[0], WAVES.start + WAVES.step(WAVES.start, ALPHA, beta), rtol=1e-12)


@pytest.mark.parametrize("alpha", [ALPHA, ALPHA / 10])
def test_theorem_3(alpha: float) -> None:
    """At every point some β lowers f + β r, and each one does that the proof names, by what it says."""
    first, lowest = WAVES.smoothness, []
    for w in POINTS:
        covered = [beta for beta in BETAS if is_covered(w, beta, alpha)]
        assert covered
        lowest.append(max(covered))
        for beta in covered:
            length = np.linalg.norm(WAVES.step(w, alpha, beta))
            promised = -first * length**2 + WAVES.rho * beta**2 * WAVES.spread(w) * length  # eq. 8
            assert change(w, beta, alpha) <= promised < 0
    assert min(lowest) > 0.15 * alpha / ALPHA
    assert alpha < ALPHA or np.median(lowest) == pytest.approx(0.84, abs=0.01)


def test_theorem_3_where_f_is_critical() -> None:
    """At the bottom of f a step of descent stands still; one of GradAlign with β <= β' lowers f + β r."""
    for at in (0.0, np.pi):  # crest and bottom
        w = WAVES.turn.T @ (WAVES.crests + at)
        gradients = WAVES.gradients(w)
        apart = gradients - gradients.mean(axis=0)
        slope = np.einsum("ijk,ik->j", np.array([WAVES.hessian(w, i) for i in range(4)]), apart) / 4
        assert np.linalg.norm(gradients.mean(axis=0)) < 1e-12
        reach = ALPHA * WAVES.smoothness / (WAVES.rho * (1 + ALPHA * WAVES.smoothness))
        largest = reach * np.linalg.norm(slope) / WAVES.spread(w)
        assert largest > 0.01
        for share in (0.01, 0.1, 0.5, 0.99):
            assert change(w, share * largest) < 0


def test_theorem_3_needs_a_small_beta() -> None:
    """Far above the bound f + β r rises at most points: the condition says something."""
    first_rise = []
    for w in POINTS:
        rises = [beta for beta in BETAS if change(w, beta) > 0]
        if rises:
            first_rise.append((min(rises), max(beta for beta in BETAS if is_covered(w, beta))))
    assert len(first_rise) == len(POINTS)
    assert np.median([rise for rise, _ in first_rise]) == pytest.approx(5.7, abs=0.1)
    assert np.median([rise / covered for rise, covered in first_rise]) == pytest.approx(7, abs=0.5)
    assert all(rise > covered for rise, covered in first_rise)
