"""The distance of clients that are pulled back, and what is divided by it."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from torch.optim import SGD

from lightning_fed.aggregators import FedAvg, FedDynServer, FedNova
from lightning_fed.client_algorithms import SCAFFOLD, FedDyn, FedGA, FedProx
from lightning_fed.functional import sgd_distance
from tests.client_algorithms.client_runs import Kept, fit
from tests.client_algorithms.hand_loops import FedNovaByHand
from tests.client_algorithms.known_clients import Linear, Quadratic

LR, MU, GRADIENTS, SIZES = 0.2, 0.7, [2, -6, 1], (2, 9, 5)


def plain(parameters: Any) -> SGD:
    return SGD(parameters, LR)


def heavy(parameters: Any) -> SGD:
    return SGD(parameters, LR, momentum=0.6, dampening=0.2)


def closed_form(steps: int) -> float:
    return (1 - (1 - LR * MU) ** steps) / MU


def heavy_distance(steps: int) -> float:
    """Powers of the matrix that takes (x, buffer, 1) through a step with the gradient 1 - μ x; the first undamped."""
    first = np.array([[1 - LR * MU, 0, LR], [-MU, 0, 1], [0, 0, 1]])
    buffer = np.array([-0.8 * MU, 0.6, 0.8])
    later = np.array([np.array([1, 0, 0]) + LR * buffer, buffer, [0, 0, 1]])
    return float((np.linalg.matrix_power(later, steps - 1) @ first @ [0, 0, 1])[0])


@pytest.mark.parametrize("steps", [1, 2, 7, 40])
@pytest.mark.parametrize("rate", [0.01, 0.5, 2.5])
def test_closed_form(steps: int, rate: float) -> None:
    """(1 - (1 - ημ)^K) / μ, also where the pull overshoots."""
    expected = (1 - (1 - rate * MU) ** steps) / MU
    assert sgd_distance([rate] * steps, pull=MU) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["plain", "heavy"])
@pytest.mark.parametrize("algorithm", [partial(FedProx, MU), FedDyn])
def test_the_distance_of_clients_in_a_round(kind: str, algorithm: Any) -> None:
    """K_i is 2, 10 and 6. FedDyn's α is a pull too, though neither of its halves asks for the distance."""
    by_hand = closed_form if kind == "plain" else heavy_distance
    asks: Any = type("Asks", (FedDyn,), {"needs_distance": True}) if algorithm is FedDyn else algorithm
    aggregator = FedDynServer(alpha=MU) if algorithm is FedDyn else FedNova()
    optimizer = plain if kind == "plain" else heavy
    tape = fit(Linear(GRADIENTS, SIZES), aggregator, asks(), optimizer=optimizer, batch_size=2, local_epochs=2)
    for i, steps in enumerate((2, 10, 6)):
        assert tape.distances[0][i] == pytest.approx(by_hand(steps), rel=1e-12)
        # From a start without h_i a client moves by its distance times its gradient.
        np.testing.assert_allclose(tape.updates[0][i], -by_hand(steps) * GRADIENTS[i], rtol=1e-12)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_a_round_in_closed_form(weighting: Any) -> None:
    """Normalised updates are the gradients themselves: u = -(Σ p_i a_i) Σ p_i g_i."""
    problem = Linear(GRADIENTS, SIZES)
    tape = fit(problem, FedNova(weighting=weighting), FedProx(MU), optimizer=plain, batch_size=2, local_epochs=2)
    p = np.array(SIZES) / 16 if weighting == "samples" else np.full(3, 1 / 3)
    a = np.array([closed_form(steps) for steps in (2, 10, 6)])
    np.testing.assert_allclose(tape.weights[0] - 7, [-(p @ a) * (p @ np.array(GRADIENTS))], rtol=1e-12)
    without = -LR * (p @ np.array([2, 10, 6])) * (p @ np.array(GRADIENTS))
    assert abs(tape.weights[0].item() - 7 - without) > 0.1


@pytest.mark.parametrize("displaced", [False, True])
def test_rounds_of_quadratics(displaced: bool) -> None:
    """With FedGA's displaced start too, whose displacement is no part of the normalised update."""
    problem = Quadratic()
    more = [FedGA(0.2)] if displaced else []
    tape = fit(problem, FedNova(), FedProx(MU), *more, optimizer="nesterov", local_epochs=2, max_rounds=2)
    loop = FedNovaByHand(problem, "nesterov", mu=MU)
    if displaced:
        loop.displacement = lambda i: 0.2 * (loop.mean_gradient() - problem.full(loop.w, i))
    for weights, batches in zip(tape.weights, tape.batches, strict=True):
        np.testing.assert_allclose(weights, loop.run(batches), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("aggregator", [FedNova, FedAvg])
def test_scaffold_finds_the_gradients_of_clients_that_are_pulled_back(aggregator: Any) -> None:
    """Option II divides by the same distance: c_i is the client's gradient without the pull."""
    algorithm = SCAFFOLD()
    kept = Kept(algorithm)
    fit(
        Linear(GRADIENTS, SIZES), aggregator(), algorithm, FedProx(MU), kept,
        optimizer=heavy, batch_size=2, max_rounds=2,
    )  # fmt: skip
    for own in kept.own:
        np.testing.assert_allclose(own.ravel(), GRADIENTS, rtol=1e-10)
