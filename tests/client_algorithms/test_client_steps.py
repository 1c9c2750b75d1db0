"""Added terms and displaced gradients within one local step: windows of batches, clipping, precision, closures."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import LBFGS, SGD

from lightning_fed import FederatedError
from lightning_fed.aggregators import FedAvg, FedDynServer
from lightning_fed.client_algorithms import (
    SCAFFOLD,
    FedDyn,
    FedGA,
    FedProx,
    GradAlign,
    LinearScaling,
    StatelessSCAFFOLD,
)
from tests.client_algorithms import hand_loops as hand
from tests.client_algorithms.client_runs import Kept, Tape, fit, make_data, make_trainer
from tests.client_algorithms.known_clients import LR, Logistic, LogisticModule, Problem, Quadratic

SIZES, ROUNDS, WINDOW = (6, 2, 0, 8, 5), 3, 2
PAIRS: dict[str, tuple[Callable[[], Any], Callable[..., hand.FedAvgByHand]]] = {
    "FedProx": (partial(FedProx, 0.7), partial(hand.FedProxByHand, mu=0.7)),
    "SCAFFOLD I": (partial(SCAFFOLD, "I"), partial(hand.ScaffoldByHand, option="I")),
    "SCAFFOLD II": (SCAFFOLD, partial(hand.ScaffoldByHand, option="II")),
    "StatelessSCAFFOLD": (StatelessSCAFFOLD, hand.StatelessByHand),
    "FedGA start": (partial(FedGA, 0.3), partial(hand.FedGAByHand, beta=0.3)),
    "FedGA step": (partial(FedGA, 0.3, "step"), partial(hand.FedGAByHand, beta=0.3, form="step")),
}


class Windows(Logistic):
    """Takes the gradient over a window of batches: their sum over the length of a full window."""

    def gradient(self, w: np.ndarray, rows: Any) -> np.ndarray:
        if isinstance(rows, list):
            return sum(super(Windows, self).gradient(w, part) for part in rows) / WINDOW
        return super().gradient(w, rows)


def windows_of(batches: list[np.ndarray], size: int) -> list[Any]:
    """Joins batches of two samples to windows, anew in each of two epochs; the last of an epoch may be short."""
    per_epoch = -(-size // 2)
    epochs = [batches[:per_epoch], batches[per_epoch:]]
    return [epoch[first : first + WINDOW] for epoch in epochs for first in range(0, per_epoch, WINDOW)]


@pytest.mark.parametrize("name", PAIRS)
def test_terms_are_added_once_for_a_window_of_batches(name: str) -> None:
    make, by_hand = PAIRS[name]
    problem = Windows(SIZES)
    tape = fit(
        problem, FedAvg(), make(), optimizer="momentum", batch_size=2, local_epochs=2, max_rounds=ROUNDS,
        accumulate_grad_batches=WINDOW,
    )  # fmt: skip
    loop = by_hand(problem, "momentum")
    for weights, batches in zip(tape.weights, tape.batches, strict=True):
        windows: Any = {i: windows_of(rows, SIZES[i]) for i, rows in batches.items()}
        np.testing.assert_allclose(weights, loop.run(windows), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", PAIRS)
def test_the_order_is_add_then_clip_then_step(name: str) -> None:
    make, by_hand = PAIRS[name]
    problem, clip = Logistic(SIZES), 0.2
    tape = fit(problem, FedAvg(), make(), local_epochs=2, max_rounds=ROUNDS, gradient_clip_val=clip)
    loop = by_hand(problem, clip=clip)
    for weights, batches in zip(tape.weights, tape.batches, strict=True):
        np.testing.assert_allclose(weights, loop.run(batches), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("algorithm", ["value", "norm"])
def test_no_step_is_longer_than_the_bound(algorithm: Any) -> None:
    """However strong the term that is added: a client that is far away is pulled back within the bound."""
    options: dict[str, Any] = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    tape = fit(Quadratic(), FedAvg(), SCAFFOLD("I"), FedProx(50.0), batch_size=8, max_rounds=2, **options)
    lengths = [update if algorithm == "value" else np.linalg.norm(update) for update in tape.updates[1].values()]
    assert np.max(np.abs(lengths)) == pytest.approx(LR * 0.01, rel=1e-3)


ALL: dict[str, Callable[[], list[Any]]] = {
    **{name: partial(lambda make: [FedAvg(), make()], make) for name, (make, _) in PAIRS.items()},
    "FedDyn": lambda: [FedDynServer(0.4), FedDyn()],
    "GradAlign": lambda: [FedAvg(), GradAlign(0.3)],
    "LinearScaling": lambda: [FedAvg(weighting="uniform"), LinearScaling()],
}


def single(name: str, precision: Any) -> tuple[Tape, np.ndarray]:
    """Trains in single precision or less; returns the tape, and SCAFFOLD's c or nothing."""
    problem = Logistic()
    problem.inputs = problem.inputs.astype(np.float32)
    module, tape, callbacks = LogisticModule(problem.start).float(), Tape(), ALL[name]()
    scaffold = isinstance(callbacks[1], SCAFFOLD)
    kept = [Kept(callbacks[1])] if scaffold else []
    trainer = make_trainer(*callbacks, *kept, tape, precision=precision, max_rounds=ROUNDS, local_epochs=1)
    trainer.fit(module, make_data(problem, 8))
    assert trainer.weights.dtype == torch.float32
    return tape, kept[0].shared[-1] if scaffold else np.zeros(0, np.float32)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.quick(8)
def test_half_precision_stays_close_to_single(name: str, precision: str) -> None:
    (tape, control), (half, half_control) = single(name, "32-true"), single(name, precision)
    moved = np.linalg.norm(tape.weights[-1] - Logistic().start)
    bound = 0.02 if precision == "bf16-mixed" else 0.1
    assert 0 < np.linalg.norm(half.weights[-1] - tape.weights[-1]) < bound * moved
    assert half_control.dtype == np.float32
    assert np.linalg.norm(half_control - control) <= 0.1 * np.linalg.norm(control)


def newton(parameters: Any, search: str | None = None) -> LBFGS:
    return LBFGS(parameters, lr=1.0, max_iter=60, tolerance_grad=1e-9, tolerance_change=1e-13, line_search_fn=search)


def minimum(problem: Problem, mu: float) -> np.ndarray:
    """The mean of the minima of f_i(w) + (μ/2) ‖w - w₀‖²."""
    w, eye = problem.start, mu * np.eye(3)
    ends = [w - np.linalg.solve(problem.hessian(w, i) + eye, problem.full(w, i)) for i in range(3)]
    return np.mean(ends, axis=0)


@pytest.mark.parametrize("mu", [0.5, 20.0])
def test_fedprox_through_the_closures_of_lbfgs(mu: float) -> None:
    problem = Quadratic((3, 4, 5))
    tape = fit(problem, FedAvg(weighting="uniform"), FedProx(mu), optimizer=newton, batch_size=5)
    np.testing.assert_allclose(tape.weights[0], minimum(problem, mu), atol=1e-6)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_fedga_through_the_closures_of_lbfgs(search: str | None) -> None:
    """Each of many evaluations in a step takes its gradient and its loss at the displaced point."""
    few: Any = partial(LBFGS, lr=0.2, max_iter=4, line_search_fn=search)
    tapes = [fit(Logistic(), FedAvg(), FedGA(0.3, form), optimizer=few, max_rounds=2) for form in ("start", "step")]
    np.testing.assert_allclose(tapes[0].weights, tapes[1].weights, rtol=0, atol=1e-9)
    assert (
        np.abs(tapes[0].weights[-1] - fit(Logistic(), FedAvg(), optimizer=few, max_rounds=2).weights[-1]).max() > 1e-3
    )


ADDING = ["FedProx", "SCAFFOLD I", "StatelessSCAFFOLD", "FedDyn"]


@pytest.mark.parametrize("name", ADDING)
def test_a_line_search_by_a_loss_without_the_added_term_is_refused(name: str) -> None:
    with pytest.raises(FederatedError, match="without line search .* got LBFGS"):
        fit(Quadratic(), *ALL[name](), optimizer=partial(newton, search="strong_wolfe"))


@pytest.mark.parametrize("name", ALL)
def test_an_optimizer_that_maximises_is_refused(name: str) -> None:
    options = {"batch_size": 8} if name in ("GradAlign", "LinearScaling") else {}
    with pytest.raises(FederatedError, match="got SGD with maximize=True"):
        fit(Quadratic(), *ALL[name](), optimizer=lambda p: SGD(p, LR, maximize=True), **options)
