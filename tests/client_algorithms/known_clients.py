"""Clients whose gradients are known in NumPy, for the tests of client algorithms."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

# Unequal sizes give unequal numbers of steps; one client has no samples.
SIZES = (6, 2, 0, 8, 5)
LR = 0.1

TORCH: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "sgd": lambda p: SGD(p, LR),
    "momentum": lambda p: SGD(p, LR, momentum=0.8, dampening=0.1),
    "nesterov": lambda p: SGD(p, LR, momentum=0.7, nesterov=True),
    "schedule": lambda p: SGD(p, LR, momentum=0.5),
    "decay": lambda p: SGD(p, LR, momentum=0.5, weight_decay=0.3),
    "adam": lambda p: Adam(p, LR),
    "adamw": lambda p: AdamW(p, LR, weight_decay=0.3),
}


class Known(LightningModule):
    """Batches are (row numbers, inputs, targets); a row number names a sample to the loops by hand."""

    optimizer: Any = "sgd"

    def configure_optimizers(self) -> Any:
        made = (self.optimizer if callable(self.optimizer) else TORCH[self.optimizer])(self.parameters())
        if self.optimizer != "schedule":
            return made
        return {"optimizer": made, "lr_scheduler": {"scheduler": StepLR(made, 2, gamma=0.5), "interval": "step"}}


class QuadraticModule(Known):
    def __init__(self, start: np.ndarray) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        _, matrix, center = batch
        away = self.w - center
        return 0.5 * torch.einsum("ni,nij,nj->n", away, matrix, away).mean()


class LogisticModule(Known):
    def __init__(self, start: np.ndarray) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        nn.utils.vector_to_parameters(torch.tensor(start), self.layer.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.layer(batch[1]), batch[2])


class LinearModule(QuadraticModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.w * batch[2]).sum(dim=1).mean()


class Problem(ABC):
    """Clients, their samples and gradients in NumPy.

    Args:
        sizes: Samples of each client; client i has the next of them.
    """

    module: Callable[[np.ndarray], Known]
    inputs: np.ndarray
    targets: np.ndarray
    start: np.ndarray

    def __init__(self, sizes: tuple[int, ...] = SIZES) -> None:
        self.sizes = sizes
        ends = np.cumsum(sizes)
        self.rows = [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        self.owner = np.repeat(np.arange(len(sizes)), sizes)
        self.rng = np.random.default_rng(len(sizes))

    @abstractmethod
    def gradient(self, w: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The gradient of the mean loss over samples, shape (d,)."""

    def full(self, w: np.ndarray, client: int) -> np.ndarray:
        """The gradient over all of a client's samples, shape (d,)."""
        return self.gradient(w, self.rows[client])


class Quadratic(Problem):
    """A sample's loss is ½ (w - b)ᵀ A (w - b), with A and b of its own around those of its client."""

    module = QuadraticModule

    def __init__(self, sizes: tuple[int, ...] = SIZES) -> None:
        super().__init__(sizes)
        factors = self.rng.normal(size=(sum(sizes), 3, 3)) + self.rng.normal(size=(len(sizes), 3, 3))[self.owner]
        self.inputs = 0.3 * factors @ factors.transpose(0, 2, 1) + 0.3 * np.eye(3)
        self.targets = self.rng.normal(size=(sum(sizes), 3)) + 2 * self.rng.normal(size=(len(sizes), 3))[self.owner]
        self.start = np.array([1.0, -0.5, 0.25])

    def gradient(self, w: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return np.einsum("nij,nj->i", self.inputs[rows], w - self.targets[rows]) / len(rows)

    def hessian(self, w: np.ndarray, client: int) -> np.ndarray:
        return self.inputs[self.rows[client]].mean(axis=0)


class Linear(Problem):
    """Client i's loss is ⟨g_i, w⟩ for every sample: its gradient is g_i wherever it is taken.

    Args:
        gradients: g_i, shape (clients, d).
        sizes: Samples of each client; one by default.
    """

    module = LinearModule

    def __init__(self, gradients: Any, sizes: tuple[int, ...] | None = None) -> None:
        self.gradients = np.array(gradients, dtype=float).reshape(len(gradients), -1)
        super().__init__(sizes or (1,) * len(gradients))
        self.inputs = np.zeros((sum(self.sizes), 1))
        self.targets = self.gradients[self.owner]
        self.start = np.full(self.gradients.shape[1], 7.0)

    def gradient(self, w: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return self.targets[rows].mean(axis=0)


class Logistic(Problem):
    """Multinomial logistic regression with a bias, on inputs that differ from client to client."""

    module = LogisticModule

    def __init__(self, sizes: tuple[int, ...] = SIZES) -> None:
        super().__init__(sizes)
        shift = self.rng.normal(size=(len(sizes), 4))
        self.inputs = self.rng.normal(size=(sum(sizes), 4)) + shift[self.owner]
        self.targets = self.rng.integers(0, 3, sum(sizes))
        self.start = 0.3 * self.rng.normal(size=15)

    def probabilities(self, w: np.ndarray, rows: np.ndarray) -> np.ndarray:
        logits = self.inputs[rows] @ w[:12].reshape(3, 4).T + w[12:]
        exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
        return exponents / exponents.sum(axis=1, keepdims=True)

    def loss(self, w: np.ndarray, client: int) -> float:
        """The mean loss over a client's samples."""
        rows = self.rows[client]
        return float(-np.log(self.probabilities(w, rows)[np.arange(len(rows)), self.targets[rows]]).mean())

    def gradient(self, w: np.ndarray, rows: np.ndarray) -> np.ndarray:
        error = self.probabilities(w, rows) - np.eye(3)[self.targets[rows]]
        return np.concatenate([(error.T @ self.inputs[rows]).ravel(), error.sum(axis=0)]) / len(rows)

    def hessian(self, w: np.ndarray, client: int) -> np.ndarray:
        """By the definition of the softmax: E[(diag p - p pᵀ) ⊗ x xᵀ], with a constant 1 as the last input."""
        rows = self.rows[client]
        p = self.probabilities(w, rows)
        spread = np.einsum("ni,ij->nij", p, np.eye(3)) - np.einsum("ni,nj->nij", p, p)
        x = np.hstack([self.inputs[rows], np.ones((len(rows), 1))])
        blocks = np.einsum("nij,nk,nl->ikjl", spread, x, x).reshape(15, 15) / len(rows)
        # From (class, input with bias) to the parameters' order: all weights, then the biases.
        order = np.concatenate([np.arange(15).reshape(3, 5)[:, :4].ravel(), [4, 9, 14]])
        return blocks[np.ix_(order, order)]


class LayeredModule(Known):
    """A normalisation of the inputs, then a linear layer."""

    def __init__(self, start: np.ndarray) -> None:
        super().__init__()
        self.scale, self.layer = nn.LayerNorm(4).double(), nn.Linear(4, 3).double()
        nn.utils.vector_to_parameters(torch.tensor(start), self.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.layer(self.scale(batch[1])), batch[2])


class Layered(Logistic):
    """Logistic regression on inputs that are normalised, scaled by γ and shifted by β: w is γ, β, then the layer's."""

    module = LayeredModule

    def __init__(self, sizes: tuple[int, ...] = SIZES) -> None:
        super().__init__(sizes)
        centred = self.inputs - self.inputs.mean(axis=1, keepdims=True)
        self.normed = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)
        self.start = np.concatenate([1 + 0.3 * self.rng.normal(size=4), 0.3 * self.rng.normal(size=19)])

    def gradient(self, w: np.ndarray, rows: np.ndarray) -> np.ndarray:
        gamma, beta, weight, bias = w[:4], w[4:8], w[8:20].reshape(3, 4), w[20:]
        hidden = gamma * self.normed[rows] + beta
        exponents = np.exp(hidden @ weight.T + bias)
        error = (exponents / exponents.sum(axis=1, keepdims=True) - np.eye(3)[self.targets[rows]]) / len(rows)
        back = error @ weight
        parts = (back * self.normed[rows]).sum(axis=0), back.sum(axis=0), (error.T @ hidden).ravel(), error.sum(axis=0)
        return np.concatenate(parts)
