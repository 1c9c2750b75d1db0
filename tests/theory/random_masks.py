"""Quadratic clients with noisy gradients under Bernoulli masks: a run of them, and its moments without any noise."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_fed.aggregators import FedAvg
from lightning_fed.core.seeding import Purpose, generator_for
from lightning_fed.core.updates import Need, ReducedUpdate
from lightning_fed.masks import Mask
from tests.client_algorithms.client_runs import fit
from tests.client_algorithms.known_clients import Known, Problem

STRENGTHS, TARGETS = np.array([1.0, 0.6, 0.3]), np.array([0.5, -1.0, 1.5])
SMOOTHNESS = float(STRENGTHS.max())  # L, of every client
BEST = float(STRENGTHS @ TARGETS / STRENGTHS.sum())  # where f is least
START = BEST + 1.0
GAP = float(STRENGTHS.mean() / 2)  # f(w_0) - f(w*)


class BernoulliCoordinates(Mask):
    """Lets each coordinate through with a chance of its own, whatever the clients send (assumption 4.5)."""

    needs = Need.MEAN

    def __init__(self, chances: Tensor) -> None:
        self.chances = chances

    def compute(self, update: ReducedUpdate) -> Tensor:
        drawn = torch.rand(len(self.chances), generator=generator_for(self.seed, Purpose.MASK, update.round))
        return (drawn < self.chances).to(update.mean.dtype)


class NoisyModule(Known):
    def __init__(self, sigma: float, start: np.ndarray) -> None:
        super().__init__()
        self.sigma, self.w = sigma, nn.Parameter(torch.tensor(start))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        _, strength, target = batch
        noise = self.sigma * torch.randn_like(self.w)
        return (0.5 * strength * (self.w - target).square() + noise * self.w).sum()


class Noisy(Problem):
    """Coordinates that are all alike: F_n = ½ a_n Σ_j (w_j - b_n)², gradients with noise of variance σ²."""

    def __init__(self, sigma: float, dimension: int) -> None:
        super().__init__((1,) * len(STRENGTHS))
        self.inputs, self.targets = STRENGTHS[:, None], TARGETS[:, None]
        self.start = np.full(dimension, START)
        self.module = partial(NoisyModule, sigma)

    def gradient(self, w: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return (self.inputs[rows] * (w - self.targets[rows])).mean(axis=0)


def trained(chances: np.ndarray, lr: float, steps: int, sigma: float, rounds: int) -> np.ndarray:
    """(∇f(w_t))_j² of the package's run before each round, shape (rounds, d)."""
    problem = Noisy(sigma, len(chances))
    aggregator = FedAvg(mask=BernoulliCoordinates(torch.tensor(chances)), weighting="uniform")
    tape = fit(problem, aggregator, batch_size=1, local_steps=steps, max_rounds=rounds, optimizer=partial(SGD, lr=lr))
    path = np.array([problem.start, *tape.weights[:-1]])
    return (STRENGTHS.mean() * (path - BEST)) ** 2


@dataclass(frozen=True)
class Moves:
    """What K local steps make of w: the update is e - c w, and noise of variance s²; arrays of one shape."""

    c: Any
    e: Any
    s2: Any


def moves(lr: Any, steps: int, sigma: float) -> Moves:
    """Exactly, as clients are quadratic. ``lr`` may be an array."""
    kept = 1 - np.multiply.outer(STRENGTHS, lr)
    moved = 1 - kept**steps
    noise = np.asarray(lr) ** 2 * sigma**2 * sum(kept ** (2 * k) for k in range(steps))
    return Moves(moved.mean(axis=0), np.tensordot(TARGETS, moved, 1) / len(STRENGTHS), noise.mean(axis=0) / len(noise))


def expected(chance: Any, lr: Any, steps: int, sigma: float, rounds: int) -> np.ndarray:
    """E (∇f(w_t))² of one coordinate before each round, shape (rounds, ...), from the first two moments of w."""
    move = moves(lr, steps, sigma)
    # In x = w - w*: x <- x + m (bias - c x + noise).
    bias, first = move.e - move.c * BEST, np.ones(np.broadcast(chance, move.c).shape)
    second, found = first.copy(), np.empty((rounds, *first.shape))
    for t in range(rounds):
        found[t] = second
        let = (1 - move.c) ** 2 * second + 2 * (1 - move.c) * bias * first + bias**2 + move.s2
        first, second = first + chance * (bias - move.c * first), (1 - chance) * second + chance * let
    return STRENGTHS.mean() ** 2 * found
