"""Non-convex clients of which every constant in the theorems on gradient alignment is known."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.client_algorithms.known_clients import Known, Problem


class WavesModule(Known):
    def __init__(self, turn: np.ndarray, start: np.ndarray) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start))
        self.register_buffer("turn", torch.tensor(turn))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        _, heights, phases = batch
        return (heights * torch.cos(self.turn @ self.w - phases)).sum(dim=1).mean()


class Waves(Problem):
    """f_i(w) = Σ_j h_ij cos(y_j - φ_ij) with y = Q w for a rotation Q; every client has one sample.

    As a sum of phasors h e^(-iφ), f is Σ_j |C_j| cos(y_j - ψ_j) with C the clients' mean, and with D_i the rest
    r(w) = (1/4n) Σ_ij (|D_ij|² - Re(D_ij² e^(2i y_j))).

    Attributes:
        smoothness: L_1, of f.
        spread_smoothness: L_2, of r.
        rho: Of the clients' Hessians.
        crests: ψ, shape (d,): f is critical where y_j - ψ_j are multiples of π.
    """

    def __init__(self, clients: int = 4, dimension: int = 6, seed: int = 0) -> None:
        super().__init__((1,) * clients)
        rng = np.random.default_rng(seed)
        self.turn = np.linalg.qr(rng.normal(size=(dimension, dimension)))[0]
        self.inputs = rng.uniform(0.5, 1.5, (clients, dimension))
        self.targets = rng.normal(size=dimension) + 0.8 * rng.normal(size=(clients, dimension))
        self.start = rng.normal(size=dimension)
        self.module = partial(WavesModule, self.turn)
        phasors = self.inputs * np.exp(-1j * self.targets)
        mean = phasors.mean(axis=0)
        self.smoothness = float(abs(mean).max())
        self.spread_smoothness = float(abs(((phasors - mean) ** 2).mean(axis=0)).max())
        self.rho = float(self.inputs.max())
        self.crests = -np.angle(mean)

    def gradient(self, w: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return -(self.inputs[rows] * np.sin(self.turn @ w - self.targets[rows])).mean(axis=0) @ self.turn

    def hessian(self, w: np.ndarray, client: int) -> np.ndarray:
        second = -self.inputs[client] * np.cos(self.turn @ w - self.targets[client])
        return self.turn.T @ (second[:, None] * self.turn)

    def gradients(self, points: np.ndarray) -> np.ndarray:
        """Each client's gradient at one point, or at its own, shape (n, d)."""
        return -(self.inputs * np.sin(points @ self.turn.T - self.targets)) @ self.turn

    def surrogate(self, w: np.ndarray, beta: float) -> float:
        """f + β r."""
        return float((self.inputs * np.cos(self.turn @ w - self.targets)).sum(axis=1).mean()) + beta * self.spread(w)

    def spread(self, w: np.ndarray) -> float:
        """R = (1/2n) Σ ‖∇f_i - ∇f‖²."""
        found = self.gradients(w)
        return float(((found - found.mean(axis=0)) ** 2).sum() / (2 * len(found)))

    def step(self, w: np.ndarray, alpha: float, beta: float) -> np.ndarray:
        """What one step of GradAlign adds."""
        found = self.gradients(w)
        return -alpha * self.gradients(w + beta * (found - found.mean(axis=0))).mean(axis=0)
