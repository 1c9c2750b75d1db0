"""SCAFFOLD's variates from round to round, and the point that it reaches."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fed import FederatedError
from lightning_fed.aggregators import FedAvg, FedDynServer, FedGMA
from lightning_fed.callbacks import ClipUpdates
from lightning_fed.client_algorithms import SCAFFOLD, FedDyn, FedGA, StatelessSCAFFOLD
from lightning_fed.core.hooks import FederatedCallback
from tests.client_algorithms.client_runs import Kept, fit
from tests.client_algorithms.known_clients import LR, Linear, LinearModule, Logistic, Quadratic

OPTIONS = pytest.mark.parametrize("option", ["I", "II"])
WEIGHTINGS = pytest.mark.parametrize("weighting", ["samples", "uniform"])


@OPTIONS
@pytest.mark.parametrize("weighting", ["samples", "uniform", "inverse"])
@pytest.mark.parametrize("optimizer", ["momentum", "decay"])
def test_c_is_the_mean_of_all_c_i_after_every_round(option: Any, weighting: Any, optimizer: str) -> None:
    """Over the clients that hold samples, whoever joined; the one that holds none has no c_i."""
    problem, algorithm = Logistic(), SCAFFOLD(option)
    kept = Kept(algorithm)
    rule = FedGMA(server_lr=0.0, weighting=weighting)  # the rule that takes them all
    fit(
        problem, rule, algorithm, kept, optimizer=optimizer,
        max_rounds=5, cohorts=[(0, 2), (3, 4), (2, 1), (0, 3), (1, 4)],
    )  # fmt: skip
    sizes = np.array(problem.sizes)
    p = np.where(sizes > 0, np.maximum(sizes, 1) ** {"samples": 1.0, "uniform": 0.0, "inverse": -1.0}[weighting], 0)
    for own, c in zip(kept.own, kept.shared, strict=True):
        np.testing.assert_allclose(c, p @ own / p.sum(), rtol=1e-12, atol=1e-13)
        assert not own[2].any()
    joined = [set(np.flatnonzero(own.any(axis=1))) for own in kept.own]
    assert joined == [{0}, {0, 3, 4}, {0, 1, 3, 4}, {0, 1, 3, 4}, {0, 1, 3, 4}]


class Watches(FederatedCallback):
    """Records c as each client of a round finds it."""

    def __init__(self, algorithm: SCAFFOLD) -> None:
        self.algorithm = algorithm
        self.seen: list[list[float]] = []

    def on_round_start(self, trainer: Any, pl_module: Any, cohort: Any) -> None:
        self.seen.append([])

    def on_client_start(self, trainer: Any, pl_module: Any, client: Any) -> None:
        assert self.algorithm.control is not None
        self.seen[-1].append(self.algorithm.control.item())


@OPTIONS
def test_all_clients_of_a_round_use_the_c_from_before_it(option: Any) -> None:
    algorithm = SCAFFOLD(option)
    watches, kept = Watches(algorithm), Kept(algorithm)
    tape = fit(Linear([2, -6, 1]), FedAvg(), algorithm, watches, kept, max_rounds=2)
    assert watches.seen == [[0.0] * 3, [kept.shared[0].item()] * 3]
    assert kept.shared[0].item() == pytest.approx(-1)
    assert [tape.updates[0][i].item() for i in range(3)] == pytest.approx([-LR * 2, LR * 6, -LR])
    assert [tape.updates[1][i].item() for i in range(3)] == pytest.approx([LR] * 3)


class Diverges(LinearModule):
    """Client 1's loss is NaN in the second round."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        trainer: Any = self.trainer
        bad = trainer.round == 2 and trainer.client is not None and trainer.client.id == 1
        return super().training_step(batch, batch_idx) * (torch.nan if bad else 1)


@OPTIONS
def test_a_client_that_diverged_keeps_its_c_i(option: Any) -> None:
    problem, algorithm = Linear([2, -6, 1]), SCAFFOLD(option)
    problem.module = Diverges
    kept = Kept(algorithm)
    with pytest.warns(UserWarning, match="Client 1 diverged in round 2"):
        tape = fit(problem, FedAvg(), algorithm, kept, Changes(problem), max_rounds=3, max_diverged=0.5)
    np.testing.assert_allclose(kept.own[1].ravel(), [3, -6, 2])
    np.testing.assert_allclose(kept.shared[1], [-1 / 3])
    np.testing.assert_allclose(tape.updates[2][1], -LR * (-4 + kept.shared[1] + 6))
    np.testing.assert_allclose(kept.own[2].ravel(), [4, -4, 3])


class Changes(FederatedCallback):
    """Adds 1 to every client's gradient in each round after the first."""

    def __init__(self, problem: Linear) -> None:
        self.problem = problem

    def on_round_start(self, trainer: Any, pl_module: Any, cohort: Any) -> None:
        if trainer.round > 1:
            trainer.source._tensors[2].add_(1)


@OPTIONS
@pytest.mark.parametrize("other", [FedGA(0.5), ClipUpdates(1e-3)])
def test_c_i_is_read_off_what_local_steps_moved(option: Any, other: Any) -> None:
    """From a displaced start, and before others edit the update, it is still the client's gradient."""
    algorithm = SCAFFOLD(option)
    kept = Kept(algorithm)
    fit(Linear([2, -6, 1]), FedAvg(), algorithm, other, kept, max_rounds=2, local_steps=3)
    for own in kept.own:
        np.testing.assert_allclose(own.ravel(), [2, -6, 1], rtol=1e-12)


# Two clients with ½ a (w - b)² each, of one and of three samples: K steps end at b + (1 - η a)^K (w - b).
A, B, STEPS = np.array([0.25, 1.0]), np.array([3.0, -1.0]), 10
P = {"samples": np.array([0.25, 0.75]), "uniform": np.array([0.5, 0.5])}


def two_clients() -> Quadratic:
    problem = Quadratic((1, 3))
    problem.inputs = A[problem.owner].reshape(4, 1, 1)
    problem.targets = B[problem.owner].reshape(4, 1)
    problem.start = np.array([5.0])
    return problem


def optimum(weighting: str) -> float:
    return np.average(B, weights=P[weighting] * A)


@WEIGHTINGS
def test_fedavg_stops_beside_the_optimum(weighting: Any) -> None:
    tape = fit(two_clients(), FedAvg(weighting=weighting), max_rounds=40, local_steps=STEPS)
    stuck = np.average(B, weights=P[weighting] * (1 - (1 - LR * A) ** STEPS))
    np.testing.assert_allclose(tape.weights[-1], stuck, atol=1e-8)
    assert abs(stuck - optimum(weighting)) > 0.1


REACH = {
    "I": lambda: SCAFFOLD("I"),
    "II": lambda: SCAFFOLD("II"),
    "stateless": StatelessSCAFFOLD,
}


@WEIGHTINGS
@pytest.mark.parametrize("kind", REACH)
@pytest.mark.quick(3)
def test_scaffold_reaches_the_optimum(kind: str, weighting: Any) -> None:
    tape = fit(two_clients(), FedAvg(weighting=weighting), REACH[kind](), max_rounds=40, local_steps=STEPS)
    np.testing.assert_allclose(tape.weights[-1], optimum(weighting), atol=1e-7)


@WEIGHTINGS
@OPTIONS
def test_scaffold_reaches_the_optimum_with_one_client_in_a_round(option: Any, weighting: Any) -> None:
    tape = fit(
        two_clients(), FedAvg(weighting=weighting), SCAFFOLD(option), max_rounds=90, local_steps=STEPS,
        clients_per_round=1,
    )  # fmt: skip
    np.testing.assert_allclose(tape.weights[-1], optimum(weighting), atol=1e-6)


def test_adam_has_no_distance_for_option_ii() -> None:
    with pytest.raises(FederatedError, match=r"got Adam, which .*: change `--model.optimizer` or `--client.option`\.$"):
        fit(Linear([1, 2]), FedAvg(), SCAFFOLD("II"), optimizer="adam")
    assert len(fit(Linear([1, 2]), FedAvg(), SCAFFOLD("I"), optimizer="adam").weights) == 1


@pytest.mark.parametrize("other", [StatelessSCAFFOLD, FedDyn])
def test_a_second_correction_is_refused(other: Any) -> None:
    with pytest.raises(FederatedError, match=f"without {other.__name__}"):
        fit(Linear([1, 2]), FedDynServer(), SCAFFOLD(), other())


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(FederatedError, match="to be one of I, II, got 'III'"):
        SCAFFOLD("III")


def test_a_new_fit_starts_from_zero() -> None:
    algorithm = SCAFFOLD()
    first, again = (fit(Linear([2, -6]), FedAvg(), algorithm, max_rounds=2) for _ in range(2))
    np.testing.assert_array_equal(first.weights, again.weights)
