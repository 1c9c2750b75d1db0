"""The two halves of FedDyn together."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fed import FederatedError
from lightning_fed.aggregators import FedAvg, FedDynServer
from lightning_fed.callbacks import ClipUpdates
from lightning_fed.client_algorithms import FedDyn
from lightning_fed.core.hooks import FederatedCallback
from tests.client_algorithms.client_runs import Kept, fit
from tests.client_algorithms.hand_loops import FedProxByHand
from tests.client_algorithms.known_clients import Linear, LinearModule, Logistic, Quadratic

ALPHA = 0.4
COHORTS = ((0, 2), (3, 4), (2, 1), (0, 3), (1, 4))


class ServerState(FederatedCallback):
    """Records the server's h after each round."""

    def __init__(self) -> None:
        self.h: list[np.ndarray] = []

    def on_after_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.h.append(trainer.aggregator.vectors["h"].numpy().copy())


def test_the_first_round_is_fedprox_and_a_longer_step() -> None:
    """N counts the four clients that hold samples; the cohort of three has two that train."""
    problem = Logistic()
    tape = fit(problem, FedDynServer(ALPHA), FedDyn(), local_epochs=3, cohorts=[(0, 2, 4)])
    clients = FedProxByHand(problem, weighting="uniform", mu=ALPHA)
    mean = clients.run(tape.batches[0]) - problem.start
    for i in (0, 4):
        np.testing.assert_allclose(tape.updates[0][i], clients.updates[i], rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(tape.weights[0], problem.start + (1 + 2 / 4) * mean, rtol=1e-10)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("clipped", [False, True])
def test_the_servers_h_is_the_mean_of_all_clients_h_i(optimizer: str, clipped: bool) -> None:
    """Over all that hold samples, whoever joined, whatever the optimizer, and where updates are edited before it."""
    algorithm, state = FedDyn(), ServerState()
    kept, more = Kept(algorithm), [ClipUpdates(0.1)] if clipped else []
    fit(
        Logistic(), FedDynServer(ALPHA), algorithm, kept, state, *more,
        optimizer=optimizer, max_rounds=5, cohorts=COHORTS,
    )  # fmt: skip
    for h, own in zip(state.h, kept.own, strict=True):
        np.testing.assert_allclose(h, own[[0, 1, 3, 4]].mean(axis=0), rtol=1e-12, atol=1e-14)
    assert all(kept.own[-1][i].any() for i in (0, 1, 3, 4))


class Diverges(LinearModule):
    """Client 1's loss is NaN in the second round."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        trainer: Any = self.trainer
        return super().training_step(batch, batch_idx) * (
            torch.nan if (trainer.round, trainer.client.id) == (2, 1) else 1
        )


def test_a_client_that_diverged_keeps_its_h_i() -> None:
    problem, algorithm, state = Linear([2, -6, 1]), FedDyn(), ServerState()
    problem.module = Diverges
    kept = Kept(algorithm)
    with pytest.warns(UserWarning, match="Client 1 diverged in round 2"):
        fit(problem, FedDynServer(ALPHA), algorithm, kept, state, max_rounds=3, max_diverged=0.5)
    assert kept.own[0][1] == kept.own[1][1] != kept.own[2][1]
    for h, own in zip(state.h, kept.own, strict=True):
        np.testing.assert_allclose(h, own.mean(axis=0), rtol=1e-12)


@pytest.mark.parametrize("count", [1, 2])
def test_feddyn_reaches_the_optimum(count: int) -> None:
    """Of two clients with ½ a (w - b)², both or one of them in a round; FedAvg would stop elsewhere."""
    problem = Quadratic((1, 3))
    problem.inputs, problem.targets = np.array([1.0, 4, 4, 4]).reshape(4, 1, 1), np.array([[3.0], [-1], [-1], [-1]])
    problem.start = np.array([5.0])
    rounds = {1: 50, 2: 20}[count]
    tape = fit(problem, FedDynServer(alpha=2.0), FedDyn(), max_rounds=rounds, local_steps=5, clients_per_round=count)
    np.testing.assert_allclose(tape.weights[-1], (1 * 3 - 4 * 1) / 5, atol=1e-4)


def test_the_clients_half_without_the_servers_is_refused() -> None:
    with pytest.raises(FederatedError, match=r"FedDynServer.*got FedAvg: set `--aggregator FedDynServer`\.$"):
        fit(Linear([1, 2]), FedAvg(), FedDyn())
