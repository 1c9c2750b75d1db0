"""Clients with scores and labels of classes, and their rounds by hand: plain torch, losses written from the papers."""

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedTrainer
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.data import FederatedDataModule
from tests.client_algorithms.client_runs import Given, make_trainer
from tests.parts import BySizes

# Client 2 has no samples; no client has all four classes, and only client 3 has the last one.
LABELS: list[list[int]] = [[0, 0, 1, 0, 0, 1], [2, 2], [], [1, 3, 3, 2, 1, 3, 3, 3], [0, 2, 2, 0, 0]]
SIZES, CLASSES, LR, BATCH = tuple(map(len, LABELS)), 4, 0.2, 3
COHORTS = ((0, 1, 3), (0, 3, 4), (3, 0, 4), (1, 3, 4))
ROUNDS = len(COHORTS)
SHAPES = {"body.weight": (5, 3), "body.bias": (5,), "head.weight": (CLASSES, 5), "head.bias": (CLASSES,)}


class ScoredModule(LightningModule):
    """A hidden layer and a head, in double precision; ``smoothing`` is that of its cross-entropy."""

    smoothing = 0.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = nn.Linear(3, 5).double(), nn.Linear(5, CLASSES).double()

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.body(x)))
        return scores

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y, label_smoothing=self.smoothing)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR)


def make_samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.tensor([label for own in LABELS for label in own])
    inputs = torch.randn(len(labels), 3, generator=generator, dtype=torch.float64) + labels[:, None] / 2
    return inputs, labels


def scored_data(*tensors: Tensor, sizes: tuple[int, ...] = SIZES) -> FederatedDataModule:
    data = TensorDataset(*(tensors or make_samples()))
    return FederatedDataModule(data, BySizes(*sizes), num_clients=len(sizes), batch_size=BATCH)


class RowTape(FederatedCallback):
    """Records the rows that each client trains on, by round, and w after it."""

    def __init__(self) -> None:
        self.rounds: list[dict[int, list[list[int]]]] = []
        self.inputs = make_samples()[0]

    def on_round_start(self, trainer: Any, pl_module: Any, cohort: Any) -> None:
        self.rounds.append({client.id: [] for client in cohort.clients})

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        rows = (batch[0][:, None] == self.inputs[None]).all(-1).long().argmax(1)
        self.rounds[-1][trainer.client.id].append(rows.tolist())


class After(FederatedCallback):
    """Records w after each round."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def on_after_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.weights.append(trainer.weights.clone())


def fit(*callbacks: Any, module: LightningModule | None = None, data: Any = None, **options: Any) -> FederatedTrainer:
    drawn = {"sampler": Given(*COHORTS), "clients_per_round": len(COHORTS[0])}
    given = {"precision": "64-true", "max_rounds": ROUNDS, "local_epochs": 2, **drawn, **options}
    ckpt_path = given.pop("ckpt_path", None)
    trainer = make_trainer(*callbacks, **given)
    trainer.fit(
        ScoredModule() if module is None else module, scored_data() if data is None else data, ckpt_path=ckpt_path
    )
    return trainer


def fit_weights(*callbacks: Any, **options: Any) -> list[Tensor]:
    """Trains; returns w after each round."""
    after = After()
    fit(*callbacks, after, **options)
    return after.weights


def unflatten(w: Tensor) -> dict[str, Tensor]:
    parts = w.split([math.prod(shape) for shape in SHAPES.values()])
    return {name: part.view(shape) for (name, shape), part in zip(SHAPES.items(), parts, strict=True)}


def features_of(w: Tensor, x: Tensor) -> Tensor:
    own = unflatten(w)
    return (x @ own["body.weight"].T + own["body.bias"]).tanh()


def scores_of(w: Tensor, x: Tensor) -> Tensor:
    own = unflatten(w)
    return features_of(w, x) @ own["head.weight"].T + own["head.bias"]


def plain_loss(scores: Tensor, y: Tensor) -> Tensor:
    """The mean cross-entropy, sample by sample."""
    return torch.stack([row.logsumexp(0) - row[label] for row, label in zip(scores, y, strict=True)]).mean()


def head_gradient(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The closed form: (softmax - onehot)ᵀ h / B, then the bias."""
    away = (scores_of(w, x).softmax(1) - torch.eye(CLASSES, dtype=w.dtype)[y]) / len(y)
    return torch.cat([(away.T @ features_of(w, x)).flatten(), away.sum(0)])


class ByHand:
    """FedAvg over clients with SGD whose loss a subclass changes.

    Attributes:
        w: The global model.
        ends: Each client's trained model of its last round.
        round: From 1.
    """

    def __init__(self) -> None:
        self.inputs, self.labels = make_samples()
        self.w = torch.cat([p.detach().flatten() for p in ScoredModule().parameters()])
        self.ends: dict[int, Tensor] = {}
        self.round = 0

    def loss(self, i: int, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return plain_loss(scores_of(w, x), y)

    def begin(self, cohort: list[int]) -> None:
        """Before the first client of a round."""

    def rows_of(self, i: int) -> Tensor:
        ends = torch.tensor(SIZES).cumsum(0)
        return torch.arange(int(ends[i]) - SIZES[i], int(ends[i]))

    def run(self, batches: dict[int, list[list[int]]]) -> Tensor:
        self.round += 1
        self.begin(sorted(batches))
        total, ends = sum(SIZES[i] for i in batches), {}
        for i, own in batches.items():
            w = self.w
            for rows in own:
                live = w.clone().requires_grad_()
                loss = self.loss(i, live, self.inputs[rows], self.labels[rows])
                w = w - LR * torch.autograd.grad(loss, live)[0]
            ends[i] = w
        self.ends |= ends
        self.w = self.w + sum(SIZES[i] / total * (end - self.w) for i, end in ends.items())
        return self.w


def counts_of(i: int) -> dict[int, int]:
    return {label: LABELS[i].count(label) for label in range(CLASSES)}


class CalibratedByHand(ByHand):
    """FedLC: -log e^{z_y - τ n_y^{-1/4}} / Σ_c e^{z_c - τ n_c^{-1/4}}; a class without samples has no summand."""

    def __init__(self, tau: float, absent: float = 0.0) -> None:
        super().__init__()
        self.tau, self.absent = tau, absent

    def counts(self, i: int) -> dict[int, float]:
        return {c: n or self.absent for c, n in counts_of(i).items() if n or self.absent}

    def offset(self, i: int, c: int, n: float) -> float:
        return -self.tau * n**-0.25

    def loss(self, i: int, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        losses = []
        for row, label in zip(scores_of(w, x), y.tolist(), strict=True):
            parts = {c: (row[c] + self.offset(i, c, n)).exp() for c, n in self.counts(i).items()}
            losses.append(-(parts[label] / sum(parts.values())).log())
        return torch.stack(losses).mean()


class GloballyCalibrated(CalibratedByHand):
    """The mistake of a library: the counts are those of all clients together."""

    def counts(self, i: int) -> dict[int, float]:
        return {c: sum(counts_of(j)[c] for j in range(len(LABELS))) for c in range(CLASSES)}


class AdjustedByHand(CalibratedByHand):
    """Menon et al.: z_c + τ log p_c."""

    def offset(self, i: int, c: int, n: float) -> float:
        return self.tau * math.log(n / SIZES[i])


class RestrictedByHand(ByHand):
    """FedRS: α z_c for classes without samples; ``fewest`` samples make a class present."""

    def __init__(self, alpha: float, fewest: int = 1) -> None:
        super().__init__()
        self.alpha, self.fewest = alpha, fewest

    def loss(self, i: int, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        factors = [1.0 if n >= self.fewest else self.alpha for n in counts_of(i).values()]
        return plain_loss(scores_of(w, x) * torch.tensor(factors, dtype=w.dtype), y)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1) / (a.square().sum(1).sqrt() * b.square().sum(1).sqrt())


class MoonByHand(ByHand):
    def __init__(self, mu: float, temperature: float) -> None:
        super().__init__()
        self.mu, self.temperature = mu, temperature

    def loss(self, i: int, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        z = features_of(w, x)
        near = (cosine(z, features_of(self.w, x)) / self.temperature).exp()
        far = (cosine(z, features_of(self.ends.get(i, self.w), x)) / self.temperature).exp()
        return super().loss(i, w, x, y) - self.mu * (near / (near + far)).log().mean()


class DistilledByHand(ByHand):
    """FedNTD, with the true class's column taken out."""

    def __init__(self, beta: float, temperature: float) -> None:
        super().__init__()
        self.beta, self.temperature = beta, temperature

    def loss(self, i: int, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        divergences = []
        for own, other, label in zip(scores_of(w, x), scores_of(self.w, x), y.tolist(), strict=True):
            rest = [c for c in range(CLASSES) if c != label]
            q, p = ((s[rest] / self.temperature).softmax(0) for s in (own, other))
            divergences.append((p * (p / q).log()).sum())
        return super().loss(i, w, x, y) + self.beta * self.temperature**2 * torch.stack(divergences).mean()


class InvariantByHand(ByHand):
    """FedIIR; ``kept`` is whether ḡ passes from round to round, which one library forgets."""

    def __init__(self, gamma: float, ema: float, kept: bool = True) -> None:
        super().__init__()
        self.gamma, self.ema, self.kept = gamma, ema, kept
        self.mean = torch.zeros(5 * CLASSES + CLASSES, dtype=torch.float64)

    def begin(self, cohort: list[int]) -> None:
        total = sum(SIZES[i] for i in cohort)
        rows = {i: self.rows_of(i) for i in cohort}
        parts = [SIZES[i] / total * head_gradient(self.w, self.inputs[r], self.labels[r]) for i, r in rows.items()]
        old = self.mean if self.kept else torch.zeros_like(self.mean)
        self.mean = self.ema * old + (1 - self.ema) * torch.stack(parts).sum(0)

    def loss(self, i: int, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        away = head_gradient(w, x, y) - self.mean
        return super().loss(i, w, x, y) + self.gamma * away @ away
