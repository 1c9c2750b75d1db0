"""MimeLite: the server's momentum is used by clients and changed by their full gradients alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed.aggregators import FedAvg
from lightning_fed.client_algorithms import SCAFFOLD, FedCM, FedProx, MimeLite
from lightning_fed.errors import FederatedError
from tests.client_algorithms import hand_loops as hand
from tests.client_algorithms.client_runs import fit
from tests.client_algorithms.known_clients import Quadratic
from tests.parts import Classifier, federated_data, federated_trainer

ROUNDS: dict[str, Any] = {"max_rounds": 3, "local_epochs": 2}


class BesideFedProx(hand.MimeLiteByHand):
    """(1 - β) g + β m + μ (w_i - w)."""

    def term(self, i: int, moved: np.ndarray) -> np.ndarray:
        return super().term(i, moved) + 0.7 * moved


@pytest.mark.parametrize("clip", [None, 0.5])
def test_beside_fedprox_it_is_scale_add_clip_step(clip: Any) -> None:
    problem = Quadratic()
    tape = fit(problem, FedAvg(), MimeLite(0.6), FedProx(0.7), gradient_clip_val=clip, **ROUNDS)
    loop = BesideFedProx(problem, beta=0.6, clip=clip)
    for batches, found in zip(tape.batches, tape.weights, strict=True):
        np.testing.assert_allclose(found, loop.run(batches), rtol=1e-10, atol=1e-12)


class WithDecay(hand.MimeLiteByHand):
    """The optimizer's decay, 0.3 w, is part of the gradient that makes m."""

    def mean_gradient(self) -> np.ndarray:
        return super().mean_gradient() + 0.3 * self.w


@pytest.mark.parametrize("decayed", [False, True])
def test_weight_decay_is_in_m_only_if_asked_for(decayed: bool) -> None:
    """Clients' optimizers decay in full in either case, unscaled by 1 - β."""
    problem = Quadratic()
    options: dict[str, Any] = {"optimizer": "decay", "full_gradient_weight_decay": decayed, **ROUNDS}
    tape = fit(problem, FedAvg(), MimeLite(0.6), **options)
    loops = [kind(problem, "decay", beta=0.6) for kind in (hand.MimeLiteByHand, WithDecay)]
    for batches, found in zip(tape.batches, tape.weights, strict=True):
        plain, with_decay = (loop.run(batches) for loop in loops)
        right, wrong = (with_decay, plain) if decayed else (plain, with_decay)
        np.testing.assert_allclose(found, right, rtol=1e-10, atol=1e-12)
    assert np.abs(found - wrong).max() > 1e-3


class Changes(hand.MimeLiteByHand):
    """Clients move the momentum in their own steps."""

    def train(self, i: int, start: np.ndarray, batches: list[np.ndarray]) -> np.ndarray:
        w, m = start, self.m
        for rows in batches:
            m = self.beta * m + (1 - self.beta) * self.problem.gradient(w, rows)
            w = w - 0.1 * m
        return w


class Sums(hand.MimeLiteByHand):
    """The momentum is of what clients moved, as in FedCM, not of gradients at w."""

    def server(self, steps: dict[int, int]) -> np.ndarray:
        moved = sum(p * (self.w - self.ends[i]) / self.distance(i, steps[i]) for i, p in self.p.items())
        former = self.m
        w = super().server(steps)
        self.m = self.beta * former + (1 - self.beta) * moved
        return w


@pytest.mark.parametrize("kind", [Changes, Sums])
def test_a_mistake_lets_local_steps_change_the_momentum(kind: type[hand.MimeLiteByHand]) -> None:
    problem = Quadratic()
    tape = fit(problem, FedAvg(), MimeLite(0.6), **ROUNDS)
    right, wrong = (make(problem, beta=0.6) for make in (hand.MimeLiteByHand, kind))
    for batches, found in zip(tape.batches, tape.weights, strict=True):
        np.testing.assert_allclose(found, right.run(batches), rtol=1e-10, atol=1e-12)
        mistaken = wrong.run(batches)
    assert np.abs(mistaken - found).max() > 1e-3


def test_the_momentum_is_over_the_clients_of_the_round_and_uses_their_weights() -> None:
    problem, made = Quadratic(), MimeLite(0.6)
    fit(problem, FedAvg(), made, cohorts=((0, 3),), max_rounds=1)
    expected = 0.4 * (6 * problem.full(problem.start, 0) + 8 * problem.full(problem.start, 3)) / 14
    assert made.momentum is not None
    np.testing.assert_allclose(made.momentum, expected, rtol=1e-12)


def trained(folder: Path, *algorithms: Any, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    trainer = federated_trainer(folder, *algorithms, **{"max_rounds": 3, **options})
    trainer.fit(Classifier(), federated_data(6, 24, 10))
    return trainer.weights


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_at_0_it_is_fedavg_to_the_bit_and_engines_agree_else(engine: Any, tmp_path: Path) -> None:
    plain = trained(tmp_path, engine=engine)
    assert torch.equal(trained(tmp_path, MimeLite(0.0), engine=engine), plain)
    found = trained(tmp_path, MimeLite(0.6), engine=engine)
    torch.testing.assert_close(found, trained(tmp_path, MimeLite(0.6), engine="sequential"), rtol=1e-5, atol=1e-6)
    assert (found - plain).abs().max() > 1e-3


def test_chunks_and_neighbours_change_nothing(tmp_path: Path) -> None:
    """Chunks add up the same gradients; SCAFFOLD with gradients at w, and a list in another order, share them."""
    whole, ones = (trained(tmp_path, MimeLite(0.6), engine="vectorized", chunk_size=size) for size in (3, 1))
    torch.testing.assert_close(whole, ones, rtol=1e-5, atol=1e-6)
    one, other = (
        trained(tmp_path, *parts) for parts in ([MimeLite(0.6), SCAFFOLD("I")], [SCAFFOLD("I"), MimeLite(0.6)])
    )
    assert torch.equal(one, other)
    assert (one - trained(tmp_path, MimeLite(0.6))).abs().max() > 1e-3


def test_another_that_scales_is_refused() -> None:
    with pytest.raises(FederatedError, match=r"one client algorithm that scales .* got MimeLite and FedCM"):
        fit(Quadratic(), FedAvg(), MimeLite(), FedCM())


@pytest.mark.parametrize("beta", [1.0, -0.1, float("nan")])
def test_bad_arguments_name_the_option(beta: float) -> None:
    with pytest.raises(FederatedError, match=r"`--client\.beta` of MimeLite"):
        MimeLite(beta)
