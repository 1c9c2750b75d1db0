"""FedGA in its forms, and its forms of one step."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adafactor

from lightning_fed import FederatedError
from lightning_fed.aggregators import FedAvg, FedGMA, FedNova
from lightning_fed.callbacks.diagnostics import GradientDissimilarity
from lightning_fed.client_algorithms import FedGA, FedProx, GradAlign, LinearScaling
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.masks import SignAgreement
from tests.client_algorithms.client_runs import Tape, fit, make_data, make_trainer
from tests.client_algorithms.hand_loops import FedGAByHand
from tests.client_algorithms.known_clients import LR, Known, Linear, LinearModule, Logistic, Quadratic

BETA, SIZES = 0.4, (6, 2, 8, 5)
FORMS: dict[str, Any] = {
    "start": {"form": "start"},
    "step": {"form": "step"},
    "global": {"form": "start", "measure_from": "global"},
}

RATE, ONE = 0.25, {"local_steps": 1, "batch_size": 8}


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


def test_gradalign_is_fedga_for_one_step_bit_for_bit() -> None:
    """In single precision, over rounds of unequal clients, under momentum and weight decay."""
    weights = []
    for algorithm in (GradAlign(RATE), FedGA(RATE, "step")):
        problem, tape = Logistic(), Tape()
        problem.inputs = problem.inputs.astype(np.float32)
        module = problem.module(problem.start).float()
        module.optimizer = "decay"
        make_trainer(FedAvg(), algorithm, tape, max_rounds=3, local_epochs=1).fit(module, make_data(problem, 8))
        weights.append(tape.weights)
    np.testing.assert_array_equal(*weights)


def test_gradalign_is_fedga_from_a_displaced_start_bit_for_bit() -> None:
    """Where no number needs rounding the two forms leave the same bits."""
    problem, rng = Quadratic((1, 2, 4, 1)), np.random.default_rng(0)
    problem.inputs = rng.integers(-2, 3, (8, 3, 3)).astype(float)
    problem.inputs += problem.inputs.transpose(0, 2, 1)
    problem.targets = rng.integers(-4, 5, (8, 3)).astype(float)
    half: Any = partial(SGD, lr=0.125)
    for weighting in ("samples", "uniform"):
        one, other = (
            fit(problem, FedAvg(weighting=weighting), algorithm, optimizer=half, max_rounds=2, **ONE)
            for algorithm in (GradAlign(RATE), FedGA(RATE))
        )
        np.testing.assert_array_equal(one.weights, other.weights)
        assert not np.array_equal(
            one.weights[1], fit(problem, FedAvg(), optimizer=half, max_rounds=2, **ONE).weights[1]
        )


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_gradalign_on_batches(engine: Any, weighting: Any) -> None:
    """The exchange and the step are on the same rows: w - η Σ p_i ∇f_B(w - β (Σ p_j ∇f_Bj(w) - ∇f_Bi(w)))."""
    problem, rows = Quadratic((4, 7, 2)), Rows()
    algorithm = GradAlign(RATE, over="batch")
    options: Any = {"max_rounds": 3, "local_steps": 1, "precision": "64-true"}
    server = FedAvg(weighting=weighting)
    trainer = make_trainer(server, algorithm, rows, engine=engine, **options)
    trainer.fit(problem.module(problem.start), make_data(problem))
    assert trainer.totals["samples"] == 3 * 8
    w, drawn = problem.start, fit(problem, FedAvg(), **options)
    p = np.array([4, 7, 2]) / 13 if weighting == "samples" else np.full(3, 1 / 3)
    for round, batches in enumerate(drawn.batches):
        own = [batches[i][0] for i in range(3)]
        assert [len(each) for each in own] == [3, 3, 2]
        gradients = np.array([problem.gradient(w, each) for each in own])
        np.testing.assert_allclose(rows.found[round], gradients, rtol=0, atol=1e-12)
        shifts = RATE * (p @ gradients - gradients)
        w = w - LR * p @ np.array([problem.gradient(w - shift, each) for shift, each in zip(shifts, own, strict=True)])
        np.testing.assert_allclose(rows.weights[round], w, rtol=0, atol=1e-12)
    assert len({tuple(batches[1][0]) for batches in drawn.batches}) > 1


class Rows(FederatedCallback):
    """Keeps what was exchanged in each round, and the model after it."""

    def __init__(self) -> None:
        self.found: list[np.ndarray] = []
        self.weights: list[np.ndarray] = []

    def on_before_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.found.append(trainer.start_gradients.rows.numpy().copy())

    def on_after_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.weights.append(trainer.weights.numpy().copy())


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "several epochs": (GradAlign, {"local_epochs": 2, "batch_size": 8}, "one local step, got 2 epochs"),
    "several steps": (GradAlign, {"local_steps": 3, "batch_size": 8}, "one local step, got 3 steps"),
    "a part of the data": (GradAlign, {"batch_size": 7}, "got batches of 7 for a client of 8 samples"),
    "windows": (GradAlign, {"accumulate_grad_batches": 2, "batch_size": 8}, "accumulate_grad_batches"),
    "an epoch of batches": (
        partial(GradAlign, over="batch"),
        {"local_epochs": 1, "batch_size": 3},
        "`--client.over batch` and",
    ),
    "several epochs, too": (LinearScaling, {"local_epochs": 2, "batch_size": 8}, "one local step, got 2 epochs"),
    "Adam": (LinearScaling, {"optimizer": "adam", **ONE}, "Expected SGD .* got Adam"),
    "Nesterov": (LinearScaling, {"optimizer": "nesterov", **ONE}, "without Nesterov's momentum"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_no_single_step_is_refused(why: str) -> None:
    algorithm, options, message = REFUSED[why]
    with pytest.raises(FederatedError, match=message):
        fit(Quadratic(), FedAvg(weighting="uniform"), algorithm(), **options)


def test_gradients_over_all_data_beside_those_of_batches_are_refused() -> None:
    both = GradAlign(over="batch"), GradientDissimilarity()
    with pytest.raises(FederatedError, match="got GradientDissimilarity, which takes them over all"):
        fit(Quadratic(), FedAvg(), *both, local_steps=1)


@pytest.mark.parametrize("server", [FedAvg, partial(FedGMA, weighting="inverse")])
def test_linear_scaling_refuses_weights_by_samples(server: Any) -> None:
    with pytest.raises(FederatedError, match=r"--aggregator.weighting uniform.*depend on their samples"):
        fit(Quadratic(), server(), LinearScaling(), **ONE)


def test_linear_scaling_sums_the_steps() -> None:
    """On losses without curvature it is the plain sum of the clients' steps."""
    tape = fit(Linear([1, 3, 8]), FedAvg(weighting="uniform"), LinearScaling(), optimizer=partial(SGD, lr=0.5), **ONE)
    np.testing.assert_allclose(tape.weights[0] - 7, [-0.5 * 12])


class Drops(LinearModule):
    """Client 1 diverges, or skips its only batch."""

    how = "skips"

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.how == "skips" and self.is_one() else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        bad = self.how == "diverges" and self.is_one() and self.training
        return super().training_step(batch, batch_idx) * (torch.nan if bad else 1)

    def is_one(self) -> bool:
        client = self.trainer.client
        return client is not None and client.id == 1


@pytest.mark.filterwarnings("ignore:Client 1 diverged")
@pytest.mark.parametrize("aggregator", [FedAvg, FedNova, partial(FedAvg, mask=SignAgreement(0.0))])
@pytest.mark.parametrize("how", ["skips", "diverges"])
def test_linear_scaling_counts_those_that_enter(how: str, aggregator: Any) -> None:
    problem = Linear([1, 3, 8])
    problem.module = type("Dropping", (Drops,), {"how": how})
    tape = fit(problem, aggregator(weighting="uniform"), LinearScaling(), max_diverged=0.5, **ONE)
    np.testing.assert_allclose(tape.weights[0] - 7, [-0.1 * (1 + 8)])
