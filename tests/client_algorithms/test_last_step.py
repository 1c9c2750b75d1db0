"""FedLESAM and FedGaLA, which look at the server's last step, and Δ-SGD, whose steps have a length of their own."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD

from lightning_fed.aggregators import FedAvg
from lightning_fed.client_algorithms import DeltaSGD, FedGaLA, FedLESAM, FedProx
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.errors import FederatedError
from tests.client_algorithms.client_runs import fit, make_data, make_trainer
from tests.client_algorithms.known_clients import Layered, Quadratic
from tests.parts import Classifier, federated_data, federated_trainer

ROUNDS: dict[str, Any] = {"max_rounds": 4, "local_epochs": 2}


def test_both_former_models_of_fedlesam_are_one_where_all_clients_take_part() -> None:
    own, last = (fit(Quadratic(), FedAvg(), FedLESAM(0.3, since), **ROUNDS).weights for since in ("own", "last"))
    assert np.array_equal(own, last)
    plain = fit(Quadratic(), FedAvg(), **ROUNDS).weights
    assert np.array_equal(own[0], plain[0])
    assert abs(own[1] - plain[1]).max() > 1e-3


def test_a_server_that_stands_still_displaces_nothing() -> None:
    problem = Quadratic((3, 3))
    problem.targets[:] = problem.start
    assert np.array_equal(fit(problem, FedAvg(), FedLESAM(1e6), **ROUNDS).weights[-1], problem.start)


class Dropped(FederatedCallback):
    """Notes how many tensors of each step have no gradient left, after those of algorithms."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.counts.append(sum(not p.grad.any() for p in pl_module.parameters()))


def test_fedgala_drops_what_does_not_go_the_way_of_a_step_that_there_was() -> None:
    """At τ = 1 nothing does: the model stands still in the second round, which leaves the third no way to go."""
    dropped = Dropped()
    tape = fit(Layered(), FedAvg(), FedGaLA(1.0), dropped, max_rounds=3)
    steps = [sum(len(batches) for batches in round.values()) for round in tape.batches]
    assert dropped.counts == [0] * steps[0] + [4] * steps[1] + [0] * steps[2]
    assert np.array_equal(tape.weights[0], tape.weights[1])
    assert abs(tape.weights[2] - tape.weights[1]).max() > 1e-3


class HoldsBias(FederatedCallback):
    """Puts the last layer's bias back in the first round, as if it had never moved."""

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        if update.client.round == 1:
            update.delta[20:] = 0


def test_fedgala_keeps_a_tensor_that_the_server_has_not_moved() -> None:
    """No step goes its way, for it has none: dropped, it would stand still for ever."""
    tape = fit(Layered(), FedAvg(), HoldsBias(), FedGaLA(1.0), max_rounds=2)
    first, second = tape.weights
    assert np.array_equal(first[:20], second[:20])
    assert abs(first[20:] - second[20:]).min() > 1e-4


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_the_steps_of_delta_sgd_do_not_know_the_learning_rate(engine: Any) -> None:
    found = []
    for lr in (0.01, 0.64):
        problem = Quadratic()
        module = problem.module(problem.start)
        module.optimizer = partial(SGD, lr=lr)
        trainer = make_trainer(DeltaSGD(), precision="64-true", engine=engine, **ROUNDS)
        trainer.fit(module, make_data(problem))
        found.append(trainer.weights.numpy().copy())
    np.testing.assert_allclose(*found, rtol=1e-11)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_delta_sgd_takes_a_second_gradient_but_in_its_first_step(engine: Any, tmp_path: Path) -> None:
    """Clients of 8, 24 and 12 samples in batches of 4: the first batch of each is looked at once."""
    torch.manual_seed(0)
    trainer = federated_trainer(tmp_path, FedAvg(), DeltaSGD(), max_rounds=1, local_epochs=1, engine=engine)
    trainer.fit(Classifier(), federated_data(8, 24, 12, batch_size=4))
    assert trainer.totals["gradients"] == 44 + 44 - 3 * 4


@pytest.mark.parametrize(
    ("others", "options", "wanted"),
    [
        ([FedAvg()], {"optimizer": "momentum"}, "SGD with one learning rate, no momentum and no weight decay"),
        ([FedAvg()], {"optimizer": "decay"}, "SGD with one learning rate, no momentum and no weight decay"),
        ([FedAvg()], {"optimizer": "adam"}, "SGD with one learning rate, no momentum and no weight decay"),
        ([FedAvg()], {"gradient_clip_val": 1.0}, "no clipping"),
        ([FedAvg(), FedProx(0.1)], {}, "no other algorithm that changes gradients"),
    ],
)
def test_delta_sgd_refuses_what_would_change_its_steps(others: list[Any], options: Any, wanted: str) -> None:
    with pytest.raises(FederatedError, match=f"^Expected {wanted} with DeltaSGD, .*, got .*: change `--"):
        fit(Quadratic(), *others, DeltaSGD(), **options)
