"""Loops by hand over clients that keep a part of the model, beside any client algorithm on the other part."""

from typing import Any

import numpy as np

from tests.client_algorithms.hand_loops import OPTIMIZERS, FedAvgByHand
from tests.client_algorithms.known_clients import Problem

__all__ = ["personal"]


class Shared:
    """A problem whose loss is of the shared coordinates, at a client's own values of the others."""

    def __init__(self, problem: Problem, own: np.ndarray) -> None:
        self.problem, self.sizes, self.own = problem, problem.sizes, own
        self.start, self.initial = problem.start[~own], problem.start[own]
        self.kept: dict[int, np.ndarray] = {}

    def value(self, client: int) -> np.ndarray:
        return self.kept.get(client, self.initial)

    def both(self, w: np.ndarray, v: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The gradients of both parts, each where the other is."""
        point = np.empty(len(self.own))
        point[~self.own], point[self.own] = w, v
        gradient = self.problem.gradient(point, rows)
        return gradient[~self.own], gradient[self.own]

    def full(self, w: np.ndarray, client: int) -> np.ndarray:
        return self.both(w, self.value(client), self.problem.rows[client])[0]


def personal(
    base: type[FedAvgByHand],
    problem: Problem,
    own: np.ndarray,
    *args: Any,
    head: int = 0,
    epochs: bool = False,
    **more: Any,
) -> Any:
    """Makes a loop of an algorithm over the shared coordinates, where ``own`` is not; ``loop.problem.kept`` has v_i.

    Args:
        base: The algorithm by hand.
        problem: The clients.
        own: Which coordinates are a client's own, in the order of the module's parameters.
        *args: See ``base``.
        head: First steps of a client, or epochs, that move v_i alone, the others w_i alone; 0 where all move both.
        epochs: Whether it counts epochs of batches of 3 samples.
        **more: See ``base``.
    """

    class Personal(base):  # type: ignore[misc, valid-type]  # any of them
        def train(self, i: int, start: np.ndarray, batches: list[np.ndarray]) -> np.ndarray:
            w, v = start, self.problem.value(i)
            step, own_step = OPTIMIZERS[self.optimizer](), OPTIMIZERS[self.optimizer]()
            first = head * -(-self.problem.sizes[i] // 3) if epochs else head
            for number, rows in enumerate(batches):
                gradient, own_gradient = self.problem.both(w - self.shift(i), v, rows)
                gradient = self.scale * gradient + self.term(i, w - start)
                moves_w, moves_v = (number >= first, number < first) if head else (True, True)
                if self.clip is not None:
                    moving = [gradient * moves_w, own_gradient * moves_v]
                    factor = min(1, self.clip / (np.linalg.norm(np.concatenate(moving)) + 1e-6))
                    gradient, own_gradient = factor * gradient, factor * own_gradient
                w = self.step(i, step, w, gradient) if moves_w else w
                v = self.step(i, own_step, v, own_gradient) if moves_v else v
            self.ended[i] = v
            return w

        def run(self, batches: dict[int, list[np.ndarray]]) -> np.ndarray:
            self.ended: dict[int, np.ndarray] = {}
            w = super().run(batches)
            self.problem.kept.update(self.ended)
            return w

    return Personal(Shared(problem, own), *args, **more)  # type: ignore[arg-type]  # stands in for a problem
