"""FedGA's two forms, and where its updates are measured from."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, Adafactor

from lightning_fed import FederatedError
from lightning_fed.aggregators import FedAvg
from lightning_fed.client_algorithms import FedGA, FedProx
from tests.client_algorithms.client_runs import Tape, fit, make_data, make_trainer
from tests.client_algorithms.hand_loops import FedGAByHand
from tests.client_algorithms.known_clients import LR, Known, Logistic, Quadratic

BETA, SIZES = 0.4, (6, 2, 8, 5)
FORMS: dict[str, Any] = {
    "start": {"form": "start"},
    "step": {"form": "step"},
    "global": {"form": "start", "measure_from": "global"},
}


def rounds(optimizer: Any, *callbacks: Any, problem: Any = None, **options: Any) -> Tape:
    return fit(problem or Logistic(SIZES), FedAvg(), *callbacks, optimizer=optimizer, **{"local_epochs": 2, **options})


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_algorithms_2_and_3_have_the_same_mean(optimizer: str, clip: float | None) -> None:
    """With unequal p_i; and, measured from the displaced start, the same update of every client."""
    runs = {
        name: rounds(optimizer, FedGA(BETA, **form), max_rounds=3, gradient_clip_val=clip)
        for name, form in FORMS.items()
    }
    for name in ("step", "global"):
        np.testing.assert_allclose(runs[name].weights, runs["start"].weights, rtol=0, atol=1e-10)
    for start, step in zip(runs["start"].updates, runs["step"].updates, strict=True):
        for i, update in start.items():
            np.testing.assert_allclose(update, step[i], rtol=0, atol=1e-10)
    if clip is not None:
        free = rounds(optimizer, FedGA(BETA), max_rounds=3)
        assert np.abs(free.weights[-1] - runs["start"].weights[-1]).max() > (1e-6 if optimizer == "adam" else 1e-2)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_measured_from_the_global_model_each_update_has_its_displacement(weighting: Any) -> None:
    problem = Logistic(SIZES)
    p = np.array(SIZES) if weighting == "samples" else np.ones(4)
    gradients = np.array([problem.full(problem.start, i) for i in range(4)])
    v = np.average(gradients, axis=0, weights=p) - gradients
    one, other = (
        fit(problem, FedAvg(weighting=weighting), FedGA(BETA, **FORMS[name])).updates[0] for name in ("start", "global")
    )
    for i in range(4):
        np.testing.assert_allclose(other[i] - one[i], -BETA * v[i], rtol=0, atol=1e-12)
    assert np.abs(BETA * v).max() > 0.05


class FedGAWithPullByHand(FedGAByHand):
    """FedProx on top, which reads w_i without displacement."""

    pull = 0.9

    def term(self, i: int, moved: np.ndarray) -> np.ndarray:
        return self.pull * moved


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("optimizer", ["sgd", "decay", "adamw"])
def test_fedprox_and_weight_decay_read_the_weights_without_displacement(optimizer: str, form: str) -> None:
    problem = Quadratic(SIZES)
    tape = rounds(optimizer, FedGA(BETA, **FORMS[form]), FedProx(0.9), problem=problem, max_rounds=2)
    loop = FedGAWithPullByHand(problem, optimizer, beta=BETA, **FORMS[form])
    for weights, batches, updates in zip(tape.weights, tape.batches, tape.updates, strict=True):
        np.testing.assert_allclose(weights, loop.run(batches), rtol=1e-10, atol=1e-11)
        for i, update in updates.items():
            np.testing.assert_allclose(update, loop.updates[i], rtol=1e-10, atol=1e-11)


def test_weight_decay_of_the_displaced_weights_would_be_something_else() -> None:
    problem = Quadratic(SIZES)
    tape = rounds("decay", FedGA(BETA), problem=problem)
    loop = FedGAByHand(problem, "decay", beta=BETA)
    loop.at_start = True
    assert np.abs(loop.run(tape.batches[0]) - tape.weights[0]).max() > 1e-3


class Lars(SGD):
    """An optimizer from elsewhere whose step is as long as the weights."""

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for p in self.param_groups[0]["params"]:
            p.data -= 0.01 * p.data.norm() * p.grad / p.grad.norm()
        return loss


READERS: dict[str, Any] = {
    "Adafactor": lambda p: Adafactor(p, LR),
    "ASGD": lambda p: torch.optim.ASGD(p, LR, lambd=0.3),
    "of the user's own": lambda p: Lars(p, LR),
}


@pytest.mark.parametrize("reader", READERS)
def test_an_optimizer_that_reads_the_weights_finds_them_without_displacement(reader: str) -> None:
    start, step = (rounds(READERS[reader], FedGA(BETA, **FORMS[form])) for form in ("start", "step"))
    np.testing.assert_allclose(start.weights, step.weights, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", ["start", "step"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_displacement_leaves_no_rounding_error_in_the_update(form: Any, precision: Any) -> None:
    """Whatever its size: with a learning rate of 0 every update is 0, where w - βv + βv would leave votes."""
    problem, tape = Logistic(SIZES), Tape()
    problem.inputs = problem.inputs.astype(np.float32)
    module = problem.module(problem.start).float()
    module.optimizer = lambda parameters: SGD(parameters, 0.0)
    make_trainer(FedAvg(), FedGA(1e3, form), tape, precision=precision).fit(module, make_data(problem))
    assert len(tape.updates[0]) == len(SIZES)
    assert all(not update.any() for update in tape.updates[0].values())


def test_gradients_of_the_cohort_alone_are_exchanged() -> None:
    """A client that is not drawn has no part in g̅."""
    problem = Quadratic(SIZES)
    tape = fit(problem, FedAvg(), FedGA(BETA), cohorts=[(1, 2)])
    np.testing.assert_allclose(tape.weights[0], FedGAByHand(problem, beta=BETA).run(tape.batches[0]), rtol=1e-10)
    assert set(tape.batches[0]) == {1, 2}


def test_a_second_displacement_is_refused() -> None:
    with pytest.raises(FederatedError, match="got FedGA and Other"):
        rounds("sgd", FedGA(BETA), type("Other", (FedGA,), {})(BETA))


@pytest.mark.parametrize("skipping", [FedGA(BETA), FedGA(BETA, "step")])
def test_a_batch_that_the_module_skips_leaves_the_weights_alone(skipping: FedGA) -> None:
    """The module returns -1 in ``on_train_batch_start`` after its first batch."""
    problem = Quadratic(SIZES)
    problem.module = type("Skips", (Quadratic.module,), {"on_train_batch_start": skip_after_first})
    tape = rounds("sgd", skipping, problem=problem, local_epochs=1)
    trained = {i: rows[:1] for i, rows in tape.batches[0].items()}
    assert any(len(rows) > 1 for rows in tape.batches[0].values())
    np.testing.assert_allclose(tape.weights[0], FedGAByHand(problem, beta=BETA).run(trained), rtol=1e-10)


def skip_after_first(self: Known, batch: Any, batch_idx: int) -> int | None:
    return -1 if batch_idx == 1 else None
