"""What algorithms of one run owe each other: order of terms, edits of an update, distances and N that fit."""

from itertools import permutations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from lightning_fed import FederatedError
from lightning_fed.aggregators import FedAvg, FedDynServer, FedNova
from lightning_fed.client_algorithms import SCAFFOLD, ClientAlgorithm, FedDyn, FedGA, FedProx
from tests.client_algorithms.client_runs import Kept, fit
from tests.client_algorithms.known_clients import Linear, Quadratic

GRADIENTS = [2, -6, 1]


class Noise(ClientAlgorithm):
    """Adds a vector that rounds otherwise at every place of the sum."""

    stacks = True

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        trainer.vector.add_to_gradient(torch.full_like(trainer.weights, 1e5 / 3))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_the_order_of_the_list_changes_no_bit(engine: Any) -> None:
    found = []
    for order in permutations([lambda: FedProx(0.3), SCAFFOLD, Noise]):
        made = [make() for make in order]
        hooks = {} if engine == "sequential" else {"engine": engine}
        found.append(weights(*made, **hooks))
    assert all(np.array_equal(found[0], other) for other in found[1:])


def weights(*algorithms: Any, **options: Any) -> Any:
    """Trains two rounds in single precision; returns the last model."""
    from tests.client_algorithms.client_runs import make_data, make_trainer

    problem = Quadratic()
    module = problem.module(problem.start)
    module.optimizer = "sgd"
    trainer = make_trainer(FedAvg(), *algorithms, max_rounds=2, precision="64-true", **options)
    trainer.fit(module, make_data(problem))
    return trainer.weights.numpy()


def test_a_hook_that_adds_no_term_comes_after_all_that_do() -> None:
    seen = []

    class Looks(ClientAlgorithm):
        adds_to_gradient = False

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            seen.append(trainer.vector.grad.clone())

    fit(Linear(GRADIENTS, (3, 3, 3)), FedAvg(), Looks(), Noise())
    assert [round(float(g)) for g in seen] == [round(1e5 / 3 + g) for g in GRADIENTS]


class Halves(ClientAlgorithm):
    """Edits the update before another algorithm does."""

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        update.delta.mul_(0.5)


def test_measuring_from_the_global_model_keeps_what_was_edited() -> None:
    """δ/2 - βv: the displacement is added to the update as the one before has left it."""
    beta, mean = 0.5, float(np.mean(GRADIENTS))
    problem = Linear(GRADIENTS, (3, 3, 3))
    tape = fit(problem, FedAvg(), Halves(), FedGA(beta, measure_from="global"))
    plain = fit(problem, FedAvg())
    for i, gradient in enumerate(GRADIENTS):
        expected = plain.updates[0][i] / 2 - beta * (mean - gradient)
        np.testing.assert_allclose(tape.updates[0][i], expected, rtol=1e-12)


@pytest.mark.parametrize("make", [lambda: (FedNova(),), lambda: (FedAvg(), SCAFFOLD())], ids=["FedNova", "SCAFFOLD"])
@pytest.mark.parametrize(("rate", "steps"), [(2.0, 2), (2.1, 2), (3.0, 4)])
def test_clients_that_swing_back_over_the_start_are_refused(make: Any, rate: float, steps: int) -> None:
    """With η μ ≥ 2 the distance is 0 or less after an even number of steps."""
    optimizer = lambda parameters: torch.optim.SGD(parameters, rate)  # noqa: E731  # of three arguments, read once
    with pytest.raises(
        FederatedError, match=rf"{steps} local steps to move it.* choose a learning rate below 1 / pull"
    ):
        fit(Linear(GRADIENTS, (9, 9, 9)), *make(), FedProx(1.0), optimizer=optimizer, local_steps=steps)


def test_steps_of_rate_zero_are_no_mistake() -> None:
    """As a warm-up begins: such a client does not move, and is not in the mean."""
    tape = fit(Linear(GRADIENTS, (3, 3, 3)), FedNova(), optimizer=lambda p: torch.optim.SGD(p, 0.0))
    assert tape.updates == [{}]


def test_clients_without_samples_do_not_count_in_n() -> None:
    """h of FedDyn's server is the mean of the h_i over those that hold samples, as c is that of SCAFFOLD's c_i."""
    server, algorithm = FedDynServer(alpha=0.4), FedDyn()
    kept = Kept(algorithm)
    fit(Linear([2, -6, 1, 9], (3, 5, 4, 0)), server, algorithm, kept, cohorts=[(0, 3), (1, 2), (0, 1)], max_rounds=3)
    np.testing.assert_allclose(server.vectors["h"].numpy(), kept.own[-1][:3].mean(axis=0), rtol=1e-12)


def test_a_client_without_steps_is_in_the_mean_of_an_exchange(tmp_path: Path) -> None:
    """As the documentation says: it has sent its gradient before it was known that it takes none."""
    seen = []

    class Looks(ClientAlgorithm):
        def start_gradients(self, round: int) -> Any:
            return "cohort"

        def on_client_start(self, trainer: Any, pl_module: Any, client: Any) -> None:
            seen.append(float(trainer.start_gradients.mean))

    problem = Linear(GRADIENTS, (3, 3, 3))

    def skip_second(module: Any, batch: Any, batch_idx: int) -> int | None:
        return -1 if module.trainer.client.id == 1 else None

    with patch.object(problem.module, "on_train_batch_start", skip_second):
        tape = fit(problem, FedAvg(), Looks())
    assert seen == pytest.approx([-1.0] * 3)
    assert set(tape.updates[0]) == {0, 2}
