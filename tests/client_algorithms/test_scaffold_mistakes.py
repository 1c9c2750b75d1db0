"""Mistakes that implementations of SCAFFOLD make, one test for each.

Most run on losses with one gradient everywhere, where option II must find that gradient: c_i⁺ = g_i, to rounding.
"""

from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed.aggregators import FedAvg
from lightning_fed.client_algorithms import SCAFFOLD
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.data import FederatedDataModule
from tests.client_algorithms.client_runs import Given, Kept, Tape, fit, make_trainer
from tests.client_algorithms.known_clients import LR, Linear, LinearModule, Quadratic
from tests.parts import BySizes

OPTIONS = pytest.mark.parametrize("option", ["I", "II"])
# Who joins in the tests of ten clients, and what their gradients are.
JOINED, TEN = (2, 5, 6), [0, 0, 1, 0, 0, 3, 8, 0, 0, 0]


def scaffold(problem: Any, option: Any = "II", weighting: Any = "uniform", **options: Any) -> tuple[Tape, Kept]:
    """Trains and returns what happened and what the clients kept."""
    algorithm = SCAFFOLD(option)
    kept, more = Kept(algorithm), options.pop("callbacks", [])
    return fit(problem, FedAvg(weighting=weighting), algorithm, kept, *more, **options), kept


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=1e-10, atol=1e-12)


@OPTIONS
def test_the_sign_inverted(option: str) -> None:
    """c_i is a gradient, not minus one, and c - c_i takes it away again: clients then walk along c together."""
    tape, kept = scaffold(Linear([-0.5, 1.5]), option, max_rounds=2, local_steps=4)
    close(kept.own, [[[-0.5], [1.5]]] * 2)
    close(kept.shared, [[0.5]] * 2)
    close([tape.updates[1][0], tape.updates[1][1]], [[-4 * LR * 0.5]] * 2)


@OPTIONS
def test_the_sum_overwritten_by_the_last_client(option: str) -> None:
    tape, kept = scaffold(Linear(TEN), option, cohorts=[JOINED])
    close(kept.shared[0], [1.2])  # (1 + 3 + 8) / 10, not 8 / 10
    close(tape.weights[0] - 7, [-4 * LR])  # the mean of 1, 3 and 8


@OPTIONS
def test_the_clients_variate_never_stored(option: str) -> None:
    tape, kept = scaffold(Linear([2, -6, 1]), option, cohorts=[(0, 1), (1, 2), (0, 2)], max_rounds=3)
    assert not kept.own[0][2].any()
    close(kept.own[0][:2], [[2], [-6]])
    close(tape.updates[2][0], -LR * (2 + kept.shared[1] - 2))


class Replaces(FederatedCallback):
    """Sets c before a round."""

    def __init__(self, value: float) -> None:
        self.value = value

    def on_round_start(self, trainer: Any, pl_module: Any, cohort: Any) -> None:
        algorithm = next(callback for callback in trainer.callbacks if isinstance(callback, SCAFFOLD))
        algorithm.control = torch.full_like(trainer.weights, self.value)


def test_the_correction_never_applied() -> None:
    none, much = (scaffold(Linear([2, -6]), callbacks=[Replaces(c)], local_steps=3)[0] for c in (0.0, 100.0))
    close(much.updates[0][1] - none.updates[0][1], [-3 * LR * 100])


def test_an_epoch_taken_for_a_batch() -> None:
    problem = Quadratic()
    plain = fit(problem, FedAvg(), local_epochs=3)
    tape, _ = scaffold(problem, local_epochs=3)
    assert {i: len(rows) for i, rows in tape.batches[0].items()} == {0: 6, 1: 3, 3: 9, 4: 6}
    assert all(
        np.array_equal(a, b)
        for i, rows in tape.batches[0].items()
        for a, b in zip(rows, plain.batches[0][i], strict=True)
    )


@OPTIONS
def test_variates_that_start_as_the_weights_or_at_random(option: str) -> None:
    """Weights start at 7; a client that joins late has a variate of zero until then."""
    tape, kept = scaffold(Linear([2, -6, 1]), option, cohorts=[(0,), (1,)], max_rounds=2)
    close(kept.shared[0], [2 / 3])
    close(kept.own[0], [[2], [0], [0]])
    close(tape.updates[0][0], [-LR * 2])
    close(tape.updates[1][1], [-LR * (-6 + 2 / 3)])


@OPTIONS
def test_the_change_of_c_weighted_by_samples_where_clients_count_alike(option: str) -> None:
    _, kept = scaffold(Linear([2, -6, 1], (1, 5, 2)), option, cohorts=[(0, 1)])
    close(kept.shared[0], [(2 - 6) / 3])


@OPTIONS
def test_the_change_of_c_not_weighted_by_samples_where_samples_count(option: str) -> None:
    _, kept = scaffold(Linear([2, -6, 1], (1, 5, 2)), option, weighting="samples", cohorts=[(0, 1)])
    close(kept.shared[0], [(1 * 2 - 5 * 6) / 8])


@OPTIONS
def test_the_change_of_c_weighted_by_steps(option: str) -> None:
    tape, kept = scaffold(Linear([2, -6, 1], (2, 9, 2)), option, batch_size=2, local_epochs=2)
    assert [len(rows) for rows in tape.batches[0].values()] == [2, 10, 2]
    close(kept.shared[0], [(2 - 6 + 1) / 3])


def test_the_correction_after_the_momentum_step() -> None:
    """Inside the gradient it goes through momentum: w_i - w = -a (g + c - c_i), with momentum's own a."""
    tape, kept = scaffold(Linear([2, -6]), optimizer="momentum", local_steps=3, max_rounds=2)
    buffers = np.cumsum([0, 1, 0.8 + 0.9, 0.8 * 1.7 + 0.9])  # momentum 0.8, dampening 0.1
    close(kept.own[0], [[2], [-6]])
    close(tape.updates[1][0], -LR * buffers[-1] * (2 + kept.shared[0] - 2))


def test_the_rate_after_the_schedule_has_stepped() -> None:
    tape, kept = scaffold(Linear([2, -6]), optimizer="schedule", local_steps=5)
    close(kept.own[0], [[2], [-6]])
    steps = [1, 1.5, 1.75, 1.875, 1.9375]  # momentum 0.5; the rate halves after every second step
    close(tape.distances[0][0], LR * (steps[0] + steps[1] + (steps[2] + steps[3]) / 2 + steps[4] / 4))


class SetsRate(FederatedCallback):
    """Changes the learning rate as users do, in one of the hooks before a step."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.set_rate)

    def set_rate(self, trainer: Any, *args: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = LR * (1 + trainer.local_step)


class WarmsUp(LinearModule):
    """Sets the rate in ``optimizer_step``, as Lightning's documentation shows."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        optimizer.param_groups[0]["lr"] = LR * (1 + self.trainer.local_step)
        optimizer.step(closure)


@pytest.mark.parametrize(
    "hook", ["on_local_step_start", "on_train_batch_start", "on_before_optimizer_step", "optimizer_step"]
)
def test_a_rate_that_was_not_used(hook: str) -> None:
    problem = Linear([2, -6])
    if hook == "optimizer_step":
        problem.module = WarmsUp
    tape, kept = scaffold(problem, local_steps=3, callbacks=[] if hook == "optimizer_step" else [SetsRate(hook)])
    close(tape.updates[0][0], [-LR * (1 + 2 + 3) * 2])
    close(kept.own[0], [[2], [-6]])


def test_a_client_smaller_than_a_batch() -> None:
    tape, kept = scaffold(Linear([2, -6], (2, 5)), batch_size=5)
    assert [len(rows) for rows in tape.batches[0].values()] == [1, 1]
    close(kept.own[0], [[2], [-6]])


class Tires(LinearModule):
    """Client 1 skips the rest of its epoch after two batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        slow = self.trainer.client.id == 1
        return -1 if slow and batch_idx == 2 else None


def test_the_steps_of_others_for_a_slow_client() -> None:
    problem = Linear([2, -6], (6, 6))
    problem.module = Tires
    tape, kept = scaffold(problem, batch_size=1)
    close(tape.distances[0][1], 2 * LR)
    close(kept.own[0], [[2], [-6]])


class Normalized(LightningModule):
    """Statistics of the inputs, which no parameter enters, and a layer that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.frozen, self.head = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.frozen.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.frozen(self.norm(batch[1]))), batch[2])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


@OPTIONS
def test_the_correction_on_buffers_and_frozen_parameters(option: Any) -> None:
    models, algorithm = [], SCAFFOLD(option)
    for callbacks in ([], [algorithm]):
        torch.manual_seed(0)
        models.append(Normalized())
        y = torch.arange(24) % 3
        data = TensorDataset(y, torch.randn(24, 4) + y[:, None], y)
        trainer = make_trainer(FedAvg(), *callbacks, max_rounds=3, sampler=Given((0, 1), (1, 2)), clients_per_round=2)
        trainer.fit(models[-1], FederatedDataModule(data, BySizes(6, 8, 10), num_clients=3, batch_size=4))
    plain, corrected = (model.state_dict() for model in models)
    same = {name for name, value in plain.items() if torch.equal(value, corrected[name])}
    assert same == {name for name in plain if "running" in name or "num_batches" in name or "frozen" in name}
    assert algorithm.control is not None
    assert algorithm.control.shape == (4 + 4 + 4 * 3 + 3,)
