"""FedACG: clients that start where the server's momentum leads, on quadratic clients and beside other methods."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fed.aggregators import FedACG, FedAvg, FedAvgM
from lightning_fed.client_algorithms import APFL, MOON, Ditto, FedGA, FedNTD, FedProx, LossAlgorithm
from lightning_fed.core.hooks import FederatedCallback
from tests.aggregators.quadratic import LR, gradients_by_hand, weights_after
from tests.parts import CLASSES, FEATURES, Classifier, federated_data, federated_trainer, points


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


class Seen(LossAlgorithm):
    """Keeps w as a term reads it, and the live weights, at each client's first step."""

    def __init__(self) -> None:
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def on_local_step_start(self, trainer: Any, pl_module: Any, client: Any, step: int) -> None:
        self.live, self.first = trainer.vector.data, step == 0

    def term(self, call: Any, own: Any) -> torch.Tensor:
        if self.first:
            self.pairs.append((call.weights.clone(), self.live.clone()))
        return call.loss * 0


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_the_global_model_of_a_loss_is_what_clients_got(precision: Any, tmp_path: Path) -> None:
    seen = Seen()
    trainer = federated_trainer(tmp_path, FedACG(0.8), seen, max_rounds=3, precision=precision, engine="sequential")
    trainer.fit(Classifier(), federated_data(20, 20))
    assert len(seen.pairs) == 6
    assert all(torch.equal(got.to(live.dtype), live) for got, live in seen.pairs)
    assert not torch.equal(seen.pairs[-1][1].float(), trainer.weights)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_one_full_batch_beside_fedntd_changes_nothing(engine: Any, tmp_path: Path) -> None:
    found = []
    for beside in ([], [FedNTD(1.0)]):
        torch.manual_seed(0)
        options: dict[str, Any] = {"max_rounds": 3, "precision": "64-true", "local_steps": 1, "local_epochs": None}
        trainer = federated_trainer(tmp_path, FedACG(0.8), *beside, engine=engine, **options)
        trainer.fit(Classifier().double(), federated_data(20, 20, batch_size=20, dataset=points_in_double()))
        found.append(trainer.weights.clone())
    torch.testing.assert_close(*found, rtol=0, atol=1e-14)


def points_in_double() -> TensorDataset:
    x, y = points(40).tensors
    return TensorDataset(x.double(), y)


@pytest.mark.parametrize("steps", [1, 3])
def test_ditto_is_pulled_to_what_clients_got(steps: int, tmp_path: Path) -> None:
    ditto, lam, w, m, own = Ditto(0.7), 0.7, np.ones(2), np.zeros(2), None
    kept: dict[int, np.ndarray] = {}

    class Notes(FederatedCallback):
        def on_client_entered(self, trainer: Any, pl_module: Any, update: Any) -> None:
            kept[update.client.id] = ditto.scratch("own", trainer.weights).numpy().copy()

    weights_after(tmp_path, FedACG(0.8), 3, steps, ditto, Notes())
    for _ in range(3):
        got = np.tile(w + 0.8 * m, (3, 1))
        own, ends = got.copy() if own is None else own, got.copy()
        for _ in range(steps):
            own = own - LR * (gradients_by_hand(own) + lam * (own - got))
            ends = ends - LR * gradients_by_hand(ends)
        m = 0.8 * m + (ends - got).mean(axis=0)
        w = w + m
    np.testing.assert_allclose([kept[i] for i in range(3)], own, rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [MOON, APFL], ids=["MOON", "APFL"])
def test_what_a_client_keeps_begins_with_what_it_gets(make: Any, tmp_path: Path) -> None:
    """Clients that are drawn for the first time after the first round."""
    begun: list[tuple[torch.Tensor, torch.Tensor]] = []
    algorithm = make()

    class Notes(FederatedCallback):
        def on_local_step_start(self, trainer: Any, pl_module: Any, client: Any, step: int) -> None:
            name = {"MOON": "last", "APFL": "own"}[make.__name__]
            if step == 0 and client.id not in known:
                known.add(client.id)
                begun.append((algorithm.scratch(name, trainer.weights).clone(), trainer.vector.data.clone()))

    known: set[int] = set()
    options: dict[str, Any] = {"max_rounds": 6, "clients_per_round": 2, "engine": "sequential"}
    net = nn.Sequential(nn.Linear(FEATURES, 4), nn.ReLU(), nn.Linear(4, CLASSES))
    trainer = federated_trainer(tmp_path, FedACG(0.8), algorithm, Notes(), **options)
    trainer.fit(Classifier(net), federated_data(8, 8, 8, 8, 8, 8))
    assert len(begun) > 3
    assert all(torch.equal(kept, live) for kept, live in begun)
