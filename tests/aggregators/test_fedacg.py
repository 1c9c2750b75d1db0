"""FedACG: clients that start where the server's momentum leads, on quadratic clients and beside other methods."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed.aggregators import FedACG, FedAvg, FedAvgM
from lightning_fed.client_algorithms import FedGA, FedProx
from lightning_fed.core.hooks import FederatedCallback
from tests.aggregators.quadratic import LR, gradients_by_hand, weights_after
from tests.parts import Classifier, federated_data, federated_trainer


def fedacg_by_hand(beta: float, lr: float, mu: float, rounds: int, steps: int, shift: Any = 0.0) -> np.ndarray:
    """Each client's start may be displaced by ``shift(ahead)``, shape (3, 2)."""
    w, m = np.ones(2), np.zeros(2)
    for _ in range(rounds):
        starts = np.tile(w + lr * beta * m, (3, 1))
        starts = starts - (shift(w) if callable(shift) else shift)
        ends = starts.copy()
        for _ in range(steps):
            ends = ends - LR * (gradients_by_hand(ends) + mu * (ends - starts))
        m = beta * m + (ends - starts).mean(axis=0)
        w = w + lr * m
    return w


@pytest.mark.parametrize("lr", [1.0, 0.6])
@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_three_quadratic_clients_over_rounds(lr: float, mu: float, tmp_path: Path) -> None:
    found = weights_after(tmp_path, FedACG(0.8, lr=lr), 4, 3, FedProx(mu))
    np.testing.assert_allclose(found, fedacg_by_hand(0.8, lr, mu, 4, 3), rtol=0, atol=1e-12)
    assert abs(found - weights_after(tmp_path, FedAvgM(0.8, lr=lr), 4, 3, FedProx(mu))).max() > 1e-2


def test_clients_are_pulled_to_where_they_start_and_not_to_the_global_model(tmp_path: Path) -> None:
    starts, origins = [], []

    class Notes(FederatedCallback):
        def on_local_step_start(self, trainer: Any, pl_module: Any, client: Any, step: int) -> None:
            if step == 0:
                starts.append(trainer.vector.data.clone())
                origins.append(trainer.origin.clone())

    weights_after(tmp_path, FedACG(0.8), 2, 2, FedProx(0.5), Notes())
    assert torch.equal(torch.stack(starts), torch.stack(origins))
    assert not torch.equal(starts[0], starts[-1])


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_without_momentum_it_is_fedprox_to_the_bit(engine: Any, tmp_path: Path) -> None:
    found = []
    for rule in (FedACG(0.0), FedAvg()):
        torch.manual_seed(0)
        trainer = federated_trainer(tmp_path, rule, FedProx(0.3), max_rounds=3, engine=engine)
        trainer.fit(Classifier(), federated_data(6, 20, 11))
        found.append(trainer.weights.clone())
    assert torch.equal(*found)


def test_the_first_round_is_that_of_fedavg_to_the_bit(tmp_path: Path) -> None:
    assert np.array_equal(weights_after(tmp_path, FedACG(0.8), 1, 3), weights_after(tmp_path, FedAvg(), 1, 3))
    assert not np.array_equal(weights_after(tmp_path, FedACG(0.8), 2, 3), weights_after(tmp_path, FedAvg(), 2, 3))


@pytest.mark.parametrize("measure_from", ["displaced", "global"])
def test_a_start_that_a_client_algorithm_displaces_is_moved_ahead_as_well(measure_from: Any, tmp_path: Path) -> None:
    """Displacements add up to 0, so that both updates have one mean: none that has the way ahead in it again."""

    def displacement(w: np.ndarray) -> np.ndarray:
        gradients = gradients_by_hand(np.tile(w, (3, 1)))
        return 0.05 * (gradients.mean(axis=0) - gradients)

    found = weights_after(tmp_path, FedACG(0.8), 3, 2, FedGA(0.05, measure_from=measure_from))
    np.testing.assert_allclose(found, fedacg_by_hand(0.8, 1.0, 0.0, 3, 2, displacement), rtol=0, atol=1e-12)
