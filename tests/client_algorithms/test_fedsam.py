"""FedSAM, MoFedSAM and Per-FedAvg: order in the step, limits, and what others make of them."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_fed.aggregators import FedAvg
from lightning_fed.client_algorithms import SCAFFOLD, FedCM, FedProx, FedSAM, PerFedAvg, PFedMe
from lightning_fed.errors import FederatedError
from lightning_fed.masks import SignAgreement
from tests.client_algorithms import second_loops as second
from tests.client_algorithms.client_runs import fit, make_data, make_trainer
from tests.client_algorithms.known_clients import Logistic, Quadratic
from tests.parts import Classifier, federated_data, federated_trainer

ROUNDS: dict[str, Any] = {"max_rounds": 3, "local_epochs": 2}


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
@pytest.mark.parametrize("problem", [Quadratic(), Logistic()], ids=["quadratic", "logistic"])
def test_mofedsam_is_fedsam_with_fedcm(problem: Any, optimizer: str) -> None:
    """α ∇f(w̃) + (1 - α) m: the gradient is replaced, then scaled, then added to, whatever the order of the list."""
    loop = second.MoFedSAMByHand(problem, optimizer, alpha=0.3, rho=0.2)
    tapes = [
        fit(problem, FedAvg(), *made, optimizer=optimizer, **ROUNDS)
        for made in ([FedSAM(0.2), FedCM(0.3)], [FedCM(0.3), FedSAM(0.2)])
    ]
    for batches, one, other in zip(tapes[0].batches, tapes[0].weights, tapes[1].weights, strict=True):
        np.testing.assert_allclose(one, loop.run(batches), rtol=1e-10, atol=1e-12)
        assert np.array_equal(one, other)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_terms_are_added_to_the_gradient_uphill_and_not_climbed_by(clip: Any) -> None:
    """FedProx's pull is no part of the ascent, and clipping comes after both."""

    class BothByHand(second.FedSAMByHand):
        def term(self, i: int, moved: np.ndarray) -> np.ndarray:
            return 0.7 * moved

    problem = Quadratic()
    tape = fit(problem, FedAvg(), FedProx(0.7), FedSAM(0.2), gradient_clip_val=clip, **ROUNDS)
    loop = BothByHand(problem, rho=0.2, clip=clip)
    for batches, found in zip(tape.batches, tape.weights, strict=True):
        np.testing.assert_allclose(found, loop.run(batches), rtol=1e-10, atol=1e-12)


def test_per_fedavg_hessian_free_is_that_of_a_loop_by_hand() -> None:
    problem = Quadratic((6, 4, 0, 8, 5))
    made, options = partial(PerFedAvg, 0.2, "hessian_free"), {**ROUNDS, "batch_size": 9}
    tape = fit(problem, FedAvg(), made(1e-3), **options)
    loop = second.PerFedAvgByHand(problem, inner=0.2, delta=1e-3)
    for batches, found in zip(tape.batches, tape.weights, strict=True):
        np.testing.assert_allclose(found, loop.run(batches), rtol=1e-7, atol=1e-9)


def test_for_quadratics_the_hessian_free_form_is_exact_and_first_order_is_not() -> None:
    """g = (I - α A) u with the client's own A, where all of its samples are one and the same."""
    problem = Quadratic((3, 3, 3))
    for client in range(3):
        rows = problem.rows[client]
        problem.inputs[rows], problem.targets[rows] = problem.inputs[rows[0]], problem.targets[rows[0]]
    steps = {"local_steps": 1, "batch_size": 3}
    free, first = (fit(problem, FedAvg(), PerFedAvg(0.2, form), **steps) for form in ("hessian_free", "first_order"))
    for client, update in free.updates[0].items():
        w = problem.start
        u = problem.full(w - 0.2 * problem.full(w, client), client)
        exact = u - 0.2 * problem.hessian(w, client) @ u
        np.testing.assert_allclose(update, -0.1 * exact, rtol=1e-8)
        np.testing.assert_allclose(first.updates[0][client], -0.1 * u, rtol=1e-12)


def test_a_batch_too_small_for_its_parts_is_refused() -> None:
    with pytest.raises(FederatedError, match=r"batches of at least 3 samples.*PerFedAvg takes 3 parts, got one of 2: "):
        fit(Quadratic(), FedAvg(), PerFedAvg(form="hessian_free"))


def weights(folder: Path, *algorithms: Any, rule: Any = FedAvg, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    trainer = federated_trainer(folder, rule(), *algorithms, max_rounds=3, **options)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    trainer.fit(Classifier(net), federated_data(6, 24, 12))
    return trainer.weights


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_at_0_it_is_fedavg_to_the_bit_and_costs_nothing(engine: Any, tmp_path: Path) -> None:
    plain = weights(tmp_path, engine=engine)
    assert torch.equal(weights(tmp_path, FedSAM(0.0), engine=engine), plain)
    assert (weights(tmp_path, FedSAM(0.2), engine=engine) - plain).abs().max() > 1e-3
    assert not FedSAM(0.0).takes_second_gradient


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("rho", [0.5, 1e6])
def test_where_the_gradient_is_zero_it_does_not_move(rho: float, engine: Any) -> None:
    """However far it would climb: there is no direction to climb in."""
    problem = Quadratic((3, 3))
    problem.targets[:] = problem.start
    trainer = make_trainer(FedSAM(rho), precision="64-true", engine=engine)
    trainer.fit(problem.module(problem.start), make_data(problem))
    assert np.array_equal(trainer.weights.numpy(), problem.start)


MADE: dict[str, Any] = {
    "FedSAM": lambda: [FedSAM(0.2)],
    "MoFedSAM": lambda: [FedSAM(0.2), FedCM(0.3)],
    "FedSAM on SCAFFOLD": lambda: [FedSAM(0.2), SCAFFOLD()],
    "PerFedAvg": lambda: [PerFedAvg(0.2)],
    "hessian_free": lambda: [PerFedAvg(0.2, "hessian_free")],
    "PFedMe": lambda: [PFedMe(3.0, 3, 0.1)],
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.quick(2)
def test_engines_and_chunks_agree_under_a_mask(name: str, tmp_path: Path) -> None:
    def run(**options: Any) -> torch.Tensor:
        torch.manual_seed(0)
        masked = FedAvg(mask=SignAgreement(0.8))
        trainer = federated_trainer(tmp_path, masked, *MADE[name](), max_rounds=3, precision="64-true", **options)
        net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        trainer.fit(Classifier(net), federated_data(6, 24, 15, 9, batch_size=9))
        return trainer.weights

    alone = run(engine="sequential")
    for options in ({"chunk_size": 4}, {"chunk_size": 3}):
        torch.testing.assert_close(run(engine="vectorized", **options), alone, rtol=1e-8, atol=1e-9)


class HeadOnly(Classifier):
    """Its optimizer holds the head alone; the body is frozen, or has gradients that nobody steps by."""

    def __init__(self, frozen: bool) -> None:
        net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        super().__init__(net, lambda m: torch.optim.SGD(m.net[2].parameters(), 0.1))
        net[0].requires_grad_(not frozen)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("name", ["FedSAM", "PerFedAvg", "hessian_free", "PFedMe"])
def test_parameters_that_no_optimizer_holds_count_no_more_than_frozen_ones(
    name: str, engine: Any, tmp_path: Path
) -> None:
    def head(frozen: bool) -> torch.Tensor:
        torch.manual_seed(0)
        trainer = federated_trainer(tmp_path, *MADE[name](), max_rounds=2, engine=engine, precision="64-true")
        trainer.fit(HeadOnly(frozen), federated_data(6, 24, 15, 9, batch_size=9))
        return trainer.weights[-27:]

    torch.testing.assert_close(head(frozen=False), head(frozen=True), rtol=1e-10, atol=1e-12)


def test_two_that_replace_the_gradient_are_refused() -> None:
    with pytest.raises(FederatedError, match=r"one client algorithm that replaces the gradient.* FedSAM and PFedMe: "):
        fit(Quadratic(), FedAvg(), FedSAM(), PFedMe())


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: FedSAM(-0.1), "rho"),
        (lambda: FedSAM(float("nan")), "rho"),
        (lambda: PerFedAvg(-1.0), "alpha"),
        (lambda: PerFedAvg(form="second"), "form"),  # type: ignore[arg-type]
        (lambda: PerFedAvg(delta=0.0), "delta"),
        (lambda: PFedMe(0.0), "lam"),
        (lambda: PFedMe(inner_steps=0), "inner_steps"),
        (lambda: PFedMe(inner_lr=0.0), "inner_lr"),
    ],
)
def test_bad_arguments_name_the_option(make: Any, option: str) -> None:
    with pytest.raises(FederatedError, match=rf"`--client\.{option}` of"):
        make()
