"""Clients with numbers of steps and learning rates of their own, against NumPy loops in double precision."""

from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from torch.optim import ASGD, SGD, Rprop

from lightning_fed.aggregators import FedAvg, FedDynServer, FedNova
from lightning_fed.client_algorithms import SCAFFOLD, FedDyn, FedGA, FedProx, GradAlign, LinearScaling
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.errors import FederatedError
from lightning_fed.sampling import ClientWork, UnequalWork
from tests.client_algorithms import hand_loops as hand
from tests.client_algorithms.client_runs import Given, fit, make_data, make_trainer
from tests.client_algorithms.known_clients import LR, SIZES, Quadratic
from tests.parts import graded

FACTORS = {0: 0.5, 1: 2.0, 3: 1.0, 4: 0.3}
# Fewer than an epoch, several, and as many as the trainer says.
STEPS = {0: 1, 1: 5, 3: 3, 4: 7}
COHORTS = ((0, 1, 3), (1, 3, 4), (3, 0, 4), (0, 1, 2, 3, 4))


class Listed(ClientWork):
    """What the tables above say."""

    def assign(self, round: int, steps: np.ndarray, steps_per_epoch: np.ndarray, seed: int) -> Any:
        return tuple(np.array([table.get(i, 1) for i in range(len(SIZES))]) for table in (STEPS, FACTORS))


METHODS = {
    "FedAvg": ((), FedAvg, hand.FedAvgByHand),
    "FedProx": ((partial(FedProx, 0.7),), FedAvg, partial(hand.FedProxByHand, mu=0.7)),
    "FedNova": ((), FedNova, partial(hand.FedNovaByHand, mu=0.0)),
    "FedNova with FedProx": ((partial(FedProx, 0.7),), FedNova, partial(hand.FedNovaByHand, mu=0.7)),
    "SCAFFOLD I": ((partial(SCAFFOLD, "I"),), FedAvg, partial(hand.ScaffoldByHand, option="I")),
    "SCAFFOLD II": ((SCAFFOLD,), FedAvg, partial(hand.ScaffoldByHand, option="II")),
    "FedGA": ((partial(FedGA, 0.3),), FedAvg, partial(hand.FedGAByHand, beta=0.3)),
    "FedDyn": ((FedDyn,), partial(FedDynServer, alpha=0.4), partial(hand.FedDynByHand, alpha=0.4)),
}
GRID = [
    (name, optimizer, engine)
    for name in METHODS
    for optimizer in ("sgd", "momentum", "nesterov", "schedule", "decay", "adam", "adamw")
    for engine in ("sequential", "vectorized")
    if optimizer not in ("adam", "adamw") or name in ("FedAvg", "FedProx", "SCAFFOLD I", "FedGA")
]


class Weights(FederatedCallback):
    """Records w after each round."""

    def __init__(self) -> None:
        self.weights: list[np.ndarray] = []

    def on_after_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.weights.append(trainer.weights.numpy().copy())


@cache
def batches() -> list[dict[int, list[np.ndarray]]]:
    """The rows that clients meet, whatever the method and the engine."""
    return fit(Quadratic(), work=Listed(), max_rounds=4, cohorts=COHORTS, local_steps=3).batches


def trained(*callbacks: Any, optimizer: Any, engine: str) -> list[np.ndarray]:
    seen, problem = Weights(), Quadratic()
    module = problem.module(problem.start)
    module.optimizer = optimizer
    trainer = make_trainer(
        *callbacks, seen, precision="64-true", max_rounds=4, sampler=Given(*COHORTS), clients_per_round=3,
        local_steps=3, work=Listed(), engine=engine,
    )  # fmt: skip
    trainer.fit(module, make_data(problem))
    return seen.weights


@pytest.mark.parametrize(("name", "optimizer", "engine"), graded(GRID))
def test_rounds_are_those_of_a_loop_by_hand(name: str, optimizer: str, engine: str) -> None:
    algorithms, server, by_hand = METHODS[name]
    weighting = "uniform" if name == "FedDyn" else "samples"
    weights = trained(*(make() for make in algorithms), server(weighting=weighting), engine=engine, optimizer=optimizer)
    loop = by_hand(Quadratic(), optimizer, weighting)
    loop.factors = FACTORS
    for expected, cohort in zip(weights, batches(), strict=True):
        assert {i: len(rows) for i, rows in cohort.items()} == {i: STEPS[i] for i in cohort}
        np.testing.assert_allclose(expected, loop.run(cohort), rtol=1e-9, atol=1e-10)
    assert np.abs(weights[-1] - loop.problem.start).max() > 0.01


def test_steps_are_windows_of_accumulated_batches() -> None:
    tape = fit(Quadratic(), work=Listed(), cohorts=((0, 1, 4),), local_steps=3, accumulate_grad_batches=2)
    # A client's epoch ends its last window: 2, 1 and 2 batches an epoch, in batches of 3.
    assert {i: len(rows) for i, rows in tape.batches[0].items()} == {0: 2, 1: 5, 4: 14}


@pytest.mark.parametrize("kind", ["closure", "own optimizer_step", "hook", "manual"])
def test_the_rate_is_the_clients_own_however_the_optimizer_is_stepped(kind: str) -> None:
    """Each makes the same steps as plain SGD."""

    class ByClosure(SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    seen, problem = Weights(), Quadratic()
    module: Any = problem.module(problem.start)
    module.optimizer = (lambda p: ByClosure(p, LR)) if kind == "closure" else "sgd"
    if kind == "own optimizer_step":
        module.__class__ = type("Own", (type(module),), {"optimizer_step": own_optimizer_step})
    if kind == "hook":
        module.__class__ = type("Own", (type(module),), {"on_before_optimizer_step": set_rate})
    if kind == "manual":
        module.__class__ = type("Own", (type(module),), {"training_step": manual_step})
        module.automatic_optimization = False
    # FedNova knows the distance of SGD itself alone, stepped by the trainer.
    rule = FedAvg if kind in ("closure", "manual") else FedNova
    trainer = make_trainer(
        seen, rule(), precision="64-true", max_rounds=4, sampler=Given(*COHORTS), clients_per_round=3,
        local_steps=3, work=Listed(),
    )  # fmt: skip
    trainer.fit(module, make_data(problem))
    plain = trained(rule(), optimizer="sgd", engine="sequential")
    np.testing.assert_allclose(seen.weights, plain, rtol=1e-12)


def own_optimizer_step(self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
    optimizer.step(closure)
    for group in optimizer.param_groups:  # as recipes for a warm-up do
        group["lr"] = LR


def manual_step(self: Any, batch: Any, batch_idx: int) -> None:
    optimizer = self.optimizers()
    optimizer.zero_grad()
    self.manual_backward(super(type(self), self).training_step(batch, batch_idx))
    optimizer.step()


def set_rate(self: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = LR


@pytest.mark.parametrize("kind", [ASGD, Rprop])
def test_rates_that_many_clients_at_once_cannot_have_are_refused_there(kind: Any) -> None:
    with pytest.raises(FederatedError, match=rf"vectorized`, but the step of {kind.__name__} is not in proportion to"):
        trained(optimizer=lambda p: kind(p, LR), engine="vectorized")
    alone, auto = (trained(optimizer=lambda p: kind(p, LR), engine=engine) for engine in ("sequential", "auto"))
    assert np.array_equal(alone, auto)


@pytest.mark.parametrize("algorithm", [GradAlign, LinearScaling])
def test_algorithms_of_one_step_refuse_it(algorithm: Any) -> None:
    with pytest.raises(
        FederatedError,
        match=rf"^Expected {algorithm.__name__} .*UnequalWork: leave out `--trainer\.par",
    ):
        make_trainer(algorithm(), FedAvg(weighting="uniform"), local_steps=1, work=UnequalWork([1, 2])).fit(
            Quadratic().module(Quadratic().start), make_data(Quadratic(), 8)
        )
