"""The client algorithms in NumPy, written from their papers: every one a round by hand over recorded batches."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.client_algorithms.known_clients import LR, Problem


class Sgd:
    """One client's SGD, as torch documents it."""

    def __init__(self, momentum: float = 0, dampening: float = 0, nesterov: bool = False, decay: float = 0) -> None:
        self.momentum, self.dampening, self.nesterov, self.decay = momentum, dampening, nesterov, decay
        self.halving: int | None = None
        self.buffer: Any = None
        self.steps = 0

    def __call__(self, w: Any, gradient: Any) -> Any:
        gradient = gradient + self.decay * w
        step = gradient
        if self.momentum:
            damped = (1 - self.dampening) * gradient
            self.buffer = gradient if self.buffer is None else self.momentum * self.buffer + damped
            step = gradient + self.momentum * self.buffer if self.nesterov else self.buffer
        lr = LR * 0.5 ** (self.steps // self.halving) if self.halving else LR
        self.steps += 1
        return w - lr * step


class Adam:
    """One client's Adam; ``decay`` is AdamW's."""

    def __init__(self, decay: float = 0) -> None:
        self.decay, self.first, self.second, self.steps = decay, 0.0, 0.0, 0

    def __call__(self, w: Any, gradient: Any) -> Any:
        self.steps += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        first, second = self.first / (1 - 0.9**self.steps), self.second / (1 - 0.999**self.steps)
        return w - LR * self.decay * w - LR * first / (np.sqrt(second) + 1e-8)


def halving() -> Sgd:
    made = Sgd(momentum=0.5)
    made.halving = 2
    return made


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": Sgd,
    "momentum": lambda: Sgd(momentum=0.8, dampening=0.1),
    "nesterov": lambda: Sgd(momentum=0.7, nesterov=True),
    "schedule": halving,
    "decay": lambda: Sgd(momentum=0.5, decay=0.3),
    "adam": Adam,
    "adamw": lambda: Adam(decay=0.3),
}


class FedAvgByHand:
    """Plain local training and a weighted mean; what an algorithm changes is in the methods below.

    Attributes:
        round: Index of the round, from 1.
        w: The global model, shape (d,).
        p: Aggregation weights p_i of the round's clients.
        updates: δ_i of the round's clients.
        factors: Factors on the clients' learning rates, where they have any.
    """

    pull, scale = 0.0, 1.0

    def __init__(
        self, problem: Problem, optimizer: str = "sgd", weighting: str = "samples", clip: float | None = None
    ) -> None:
        self.problem, self.optimizer, self.weighting, self.clip = problem, optimizer, weighting, clip
        self.round, self.w = 0, problem.start
        self.factors: dict[int, float] = {}
        self.decays = optimizer in ("decay", "adamw")

    def run(self, batches: dict[int, list[np.ndarray]]) -> np.ndarray:
        """Runs a round of these clients on these rows; returns w, shape (d,)."""
        self.round += 1
        sizes = {i: self.problem.sizes[i] if self.weighting == "samples" else 1 for i in sorted(batches)}
        self.p = {i: size / sum(sizes.values()) for i, size in sizes.items()}
        self.prepare()
        self.ends, self.updates = {}, {}
        for i in self.p:
            start = self.w - self.displacement(i)
            self.ends[i] = self.train(i, start, batches[i])
            self.updates[i] = self.measure(i, start)
        self.w = self.server({i: len(batches[i]) for i in self.p})
        return self.w

    def train(self, i: int, start: np.ndarray, batches: list[np.ndarray]) -> np.ndarray:
        w, step = start, OPTIMIZERS[self.optimizer]()
        for rows in batches:
            gradient = self.scale * self.gradient(i, w, rows) + self.term(i, w - start)
            if self.clip is not None:
                gradient = gradient * min(1, self.clip / (np.linalg.norm(gradient) + 1e-6))
            w = self.step(i, step, w, gradient)
        return w

    def gradient(self, i: int, w: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The gradient of the loss that a step is taken by, before it is scaled and added to."""
        return self.problem.gradient(w - self.shift(i), rows)

    def step(self, i: int, step: Any, w: Any, gradient: Any) -> Any:
        """A step at the client's own rate: what it changes is in proportion to it."""
        return w + self.factors.get(i, 1.0) * (step(w, gradient) - w)

    def distance(self, i: int, steps: int) -> float:
        """How far the client's optimizer moves a scalar of gradient 1, without decay."""
        x, step = 0.0, OPTIMIZERS[self.optimizer]()
        step.decay = 0
        for _ in range(steps):
            x = self.step(i, step, x, 1 + self.pull * x)
        return -x

    def mean_gradient(self) -> np.ndarray:
        return sum(p * self.problem.full(self.w, i) for i, p in self.p.items())

    def prepare(self) -> None:
        """Before the first client of a round."""

    def displacement(self, i: int) -> Any:
        """What is taken off the client's start."""
        return 0.0

    def shift(self, i: int) -> Any:
        """What is taken off the point of each gradient."""
        return 0.0

    def term(self, i: int, moved: np.ndarray) -> Any:
        """What is added to each gradient."""
        return 0.0

    def measure(self, i: int, start: np.ndarray) -> np.ndarray:
        return self.ends[i] - start

    def server(self, steps: dict[int, int]) -> np.ndarray:
        return self.w + sum(p * self.updates[i] for i, p in self.p.items())


class FedProxByHand(FedAvgByHand):
    def __init__(self, *args: Any, mu: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pull = mu

    def term(self, i: int, moved: np.ndarray) -> np.ndarray:
        return self.pull * moved


class FedCMByHand(FedProxByHand):
    """Xu et al., Algorithm 1, with each client's own number of steps, and FedProx's term beside it."""

    def __init__(self, *args: Any, alpha: float, mu: float = 0.0, **options: Any) -> None:
        super().__init__(*args, mu=mu, **options)
        self.scale = alpha
        self.m = np.zeros_like(self.w)

    def term(self, i: int, moved: np.ndarray) -> np.ndarray:
        return (1 - self.scale) * self.m + super().term(i, moved)

    def server(self, steps: dict[int, int]) -> np.ndarray:
        self.m = sum(p * (self.w - self.ends[i]) / self.distance(i, steps[i]) for i, p in self.p.items())
        return super().server(steps)


class MimeLiteByHand(FedAvgByHand):
    """Karimireddy et al., Algorithm 1 without the control variate, with SGDm: statistics that clients use alone."""

    def __init__(self, *args: Any, beta: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.beta, self.scale = beta, 1 - beta
        self.m = np.zeros_like(self.w)

    def term(self, i: int, moved: np.ndarray) -> np.ndarray:
        return self.beta * self.m

    def server(self, steps: dict[int, int]) -> np.ndarray:
        self.m = self.beta * self.m + (1 - self.beta) * self.mean_gradient()
        return super().server(steps)


class ScaffoldByHand(FedAvgByHand):
    """Karimireddy et al., Algorithm 1; N counts the clients with samples, weights are the aggregator's."""

    def __init__(self, *args: Any, option: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.option = option
        self.own = [np.zeros_like(self.w) for _ in self.problem.sizes]
        self.c = np.zeros_like(self.w)

    def term(self, i: int, moved: np.ndarray) -> np.ndarray:
        return self.c - self.own[i]

    def server(self, steps: dict[int, int]) -> np.ndarray:
        sizes = self.problem.sizes
        uniform = {i: 1 / np.count_nonzero(sizes) for i in self.p}
        share = uniform if self.weighting == "uniform" else {i: sizes[i] / sum(sizes) for i in self.p}
        change = np.zeros_like(self.c)
        for i in self.p:
            new = self.own[i] - self.c + (self.w - self.ends[i]) / self.distance(i, steps[i])
            new = self.problem.full(self.w, i) if self.option == "I" else new
            change += share[i] * (new - self.own[i])
            self.own[i] = new
        self.c = self.c + change
        return super().server(steps)


class StatelessByHand(FedAvgByHand):
    """Dandi, Barba, Jaggi, Algorithm 4."""

    def term(self, i: int, moved: np.ndarray) -> np.ndarray:
        return self.mean_gradient() - self.problem.full(self.w, i)


class FedGAByHand(FedAvgByHand):
    """Dandi, Barba, Jaggi, Algorithms 2 and 3; weight decay, which reads w_i, makes it Algorithm 3."""

    def __init__(self, *args: Any, beta: Any, form: str = "start", measure_from: str = "displaced", **options: Any):
        super().__init__(*args, **options)
        self.beta, self.measure_from = beta, measure_from
        self.at_start = form == "start" and not self.decays
        self.has_displaced_end = form == "start" and self.decays

    def prepare(self) -> None:
        beta, mean = self.beta(self.round) if callable(self.beta) else self.beta, self.mean_gradient()
        self.v = {i: beta * (mean - self.problem.full(self.w, i)) for i in self.p}

    def displacement(self, i: int) -> Any:
        return self.v[i] if self.at_start else 0.0

    def shift(self, i: int) -> Any:
        return 0.0 if self.at_start else self.v[i]

    def measure(self, i: int, start: np.ndarray) -> np.ndarray:
        if self.measure_from == "displaced":
            return self.ends[i] - start
        # Algorithm 2's end is displaced, whichever way decay was kept off the displacement.
        return self.ends[i] - self.w - (self.v[i] if self.has_displaced_end else 0.0)


class LinearScalingByHand(FedAvgByHand):
    """Dandi, Barba, Jaggi, appendix A.2: w - α Σ_i ∇f_i(w - (α/2) Σ_{j≠i} ∇f_j(w))."""

    def shift(self, i: int) -> np.ndarray:
        others = [self.problem.full(self.w, j) for j in self.p if j != i]
        return LR / 2 * sum(others, np.zeros_like(self.w))

    def measure(self, i: int, start: np.ndarray) -> np.ndarray:
        return len(self.p) * (self.ends[i] - start)


class FedDynByHand(FedAvgByHand):
    """Acar et al., Algorithm 1; N counts the clients that hold samples."""

    def __init__(self, *args: Any, alpha: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.alpha = self.pull = alpha
        self.own = [np.zeros_like(self.w) for _ in self.problem.sizes]
        self.h = np.zeros_like(self.w)

    def term(self, i: int, moved: np.ndarray) -> np.ndarray:
        return self.alpha * moved - self.own[i]

    def server(self, steps: dict[int, int]) -> np.ndarray:
        for i in self.p:
            self.own[i] = self.own[i] - self.alpha * (self.ends[i] - self.w)
        self.h = self.h - self.alpha / np.count_nonzero(self.problem.sizes) * sum(self.ends[i] - self.w for i in self.p)
        return sum(self.ends[i] for i in self.p) / len(self.p) - self.h / self.alpha


class FedNovaByHand(FedProxByHand):
    """Wang et al., eq. 6, over clients with a proximal term."""

    def server(self, steps: dict[int, int]) -> np.ndarray:
        a = {i: self.distance(i, steps[i]) for i in self.p}
        mean = sum(p * self.updates[i] / a[i] for i, p in self.p.items())
        return self.w + sum(p * a[i] for i, p in self.p.items()) * mean
