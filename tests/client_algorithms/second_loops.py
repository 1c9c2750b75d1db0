"""The methods that take a second gradient, or whose clients have models of their own, in NumPy: see ``hand_loops``."""

from typing import Any

import numpy as np

from tests.client_algorithms.hand_loops import OPTIMIZERS, FedAvgByHand, FedCMByHand


class Sam(FedAvgByHand):
    """Qu et al., Algorithm 1, over any of the loops."""

    rho = 0.0

    def gradient(self, i: int, w: np.ndarray, rows: np.ndarray) -> np.ndarray:
        uphill = super().gradient(i, w, rows)
        return super().gradient(i, w + self.rho * uphill / np.sqrt((uphill**2).sum()), rows)


class FedSAMByHand(Sam):
    def __init__(self, *args: Any, rho: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rho = rho


class MoFedSAMByHand(Sam, FedCMByHand):
    """The same with the gradient of FedCM: α ∇f(w̃) + (1 - α) m."""

    def __init__(self, *args: Any, rho: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rho = rho


class LesamByHand(FedAvgByHand):
    """Fan et al.: gradients on the way back to the model of the client's last round, or of the last round."""

    def __init__(self, *args: Any, rho: float, last: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rho, self.last = rho, last
        self.sent: list[np.ndarray] = []
        self.got: dict[int, np.ndarray] = {}

    def prepare(self) -> None:
        self.now, self.sent = {i: self.w.copy() for i in self.p}, [*self.sent, self.w.copy()]

    def shift(self, i: int) -> Any:
        old = (self.sent[-2] if len(self.sent) > 1 else None) if self.last else self.got.get(i)
        way = np.zeros_like(self.w) if old is None else old - self.w
        return -self.rho * way / max(np.sqrt(way @ way), 1e-300)

    def server(self, steps: dict[int, int]) -> np.ndarray:
        self.got.update(self.now)
        return super().server(steps)


class GalaByHand(FedAvgByHand):
    """Pourpanah et al., local alignment, on the tensors of ``Layered``."""

    def __init__(self, *args: Any, threshold: float, sign: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.threshold, self.sign = threshold, sign
        self.sent: list[np.ndarray] = []

    def prepare(self) -> None:
        self.sent = [*self.sent, self.w.copy()]

    def gradient(self, i: int, w: np.ndarray, rows: np.ndarray) -> np.ndarray:
        gradient = super().gradient(i, w, rows).copy()
        for at in (slice(0, 4), slice(4, 8), slice(8, 20), slice(20, 23)) if len(self.sent) > 1 else ():
            g, way = gradient[at], (self.sent[-1] - self.sent[-2])[at]
            cosine = self.sign * (g @ way) / np.sqrt((g @ g) * (way @ way))
            gradient[at] = 0 if cosine < self.threshold else g
        return gradient


class DeltaSgdByHand(FedAvgByHand):
    """Kim et al., Algorithm 1, both gradients on one batch."""

    def __init__(self, *args: Any, eta: float, gamma: float, delta: float, theta: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.first, self.bound, self.growth = (eta, theta), gamma, delta

    def train(self, i: int, start: np.ndarray, batches: list[np.ndarray]) -> np.ndarray:
        w, (eta, theta), old = start, self.first, None
        self.ways = {**getattr(self, "ways", {}), i: 0.0}
        for rows in batches:
            gradient = self.problem.gradient(w, rows)
            if old is not None:
                turned = np.sqrt(((gradient - self.problem.gradient(old, rows)) ** 2).sum())
                smooth = self.bound * np.sqrt(((w - old) ** 2).sum()) / (2 * turned)
                new = min(smooth, np.sqrt(1 + self.growth * theta) * eta)
                eta, theta = new, new / eta
            self.ways[i] += eta
            old, w = w, w - eta * gradient
        return w


class DeltaNovaByHand(DeltaSgdByHand):
    """Its steps under FedNova, whose distances are how far they went."""

    def server(self, steps: dict[int, int]) -> np.ndarray:
        mean = sum(p * self.ways[i] for i, p in self.p.items())
        return self.w + mean * sum(p * self.updates[i] / self.ways[i] for i, p in self.p.items())


class PerFedAvgByHand(FedAvgByHand):
    """Fallah et al., Algorithm 1, first-order, or with the Hessian's product by differences."""

    def __init__(self, *args: Any, inner: float, delta: float | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.inner, self.delta = inner, delta

    def gradient(self, i: int, w: np.ndarray, rows: np.ndarray) -> np.ndarray:
        count = 2 if self.delta is None else 3
        bounds = [len(rows) * k // count for k in range(count + 1)]
        parts = [rows[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
        u = self.problem.gradient(w - self.inner * self.problem.gradient(w, parts[0]), parts[1])
        if self.delta is None:
            return u
        above, below = (self.problem.gradient(w + side * self.delta * u, parts[2]) for side in (1, -1))
        return u - self.inner * (above - below) / (2 * self.delta)


class OwnByHand(FedAvgByHand):
    """What methods with own models share.

    Attributes:
        own: v_i of each client that has one.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.own: dict[int, np.ndarray] = {}

    def shown(self, i: int) -> np.ndarray:
        """A client's own model after the round."""
        return self.own.get(i, self.w)


class LocalOnlyByHand(OwnByHand):
    """Each client by itself."""

    def train(self, i: int, start: np.ndarray, batches: list[np.ndarray]) -> np.ndarray:
        self.own[i] = super().train(i, self.own.get(i, start), batches)
        return start


class PFedMeByHand(OwnByHand):
    """Dinh et al., Algorithm 1, with K steps of gradient descent from w_i for θ."""

    def __init__(self, *args: Any, lam: float, steps: int, lr: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lam, self.inner_steps, self.inner_lr = lam, steps, lr

    def gradient(self, i: int, w: np.ndarray, rows: np.ndarray) -> np.ndarray:
        theta = w
        for _ in range(self.inner_steps):
            theta = theta - self.inner_lr * (self.problem.gradient(theta, rows) + self.lam * (theta - w))
        self.own[i] = theta
        return self.lam * (w - theta)


class StepsByHand(OwnByHand):
    """A step of v_i beside each of w_i, with its own state of the optimizer."""

    def train(self, i: int, start: np.ndarray, batches: list[np.ndarray]) -> np.ndarray:
        w, v = start, self.own.get(i, self.w)
        step, own_step = OPTIMIZERS[self.optimizer](), OPTIMIZERS[self.optimizer]()
        for rows in batches:
            v, w = (
                self.step(i, own_step, v, self.own_gradient(i, v, w, rows)),
                self.step(i, step, w, self.problem.gradient(w, rows)),
            )
        self.own[i] = v
        return w

    def own_gradient(self, i: int, v: np.ndarray, w: np.ndarray, rows: np.ndarray) -> np.ndarray:
        raise NotImplementedError


class DittoByHand(StepsByHand):
    """Li et al., Algorithm 1."""

    def __init__(self, *args: Any, lam: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lam = lam

    def own_gradient(self, i: int, v: np.ndarray, w: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return self.problem.gradient(v, rows) + self.lam * (v - self.w)


class APFLByHand(StepsByHand):
    """Deng et al., Algorithm 1; α adapts at the rate of the step, from its gradient ⟨v - w, ∇f(v̄)⟩."""

    def __init__(self, *args: Any, alpha: float, rate: float = 0.0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.start, self.rate = alpha, rate
        self.alphas: dict[int, float] = {}

    def own_gradient(self, i: int, v: np.ndarray, w: np.ndarray, rows: np.ndarray) -> np.ndarray:
        alpha = self.alphas.get(i, self.start)
        gradient = self.problem.gradient(alpha * v + (1 - alpha) * w, rows)
        rate = self.rate * self.factors.get(i, 1.0)
        self.alphas[i] = min(1.0, max(0.0, alpha - rate * float((v - w) @ gradient)))
        return alpha * gradient

    def shown(self, i: int) -> np.ndarray:
        alpha = self.alphas.get(i, self.start)
        return alpha * self.own.get(i, self.w) + (1 - alpha) * self.w
