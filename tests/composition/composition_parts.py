"""One small federated run for any aggregator, mask, client algorithm and option, and the list of the first two."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from lightning_fed import FederatedTrainer, aggregators
from lightning_fed.aggregators import Aggregator
from lightning_fed.core.updates import Need
from lightning_fed.data import FederatedDataModule
from lightning_fed.masks import (
    DelayedMask,
    MagnitudeAgreement,
    Mask,
    MaskControl,
    NoiseFloorMask,
    PartialMask,
    SANDMask,
    SignAgreement,
)
from lightning_fed.sampling import ClientSampler
from tests.composition.client_parts import CLIENT_LIMITS, CLIENTS, LATE
from tests.parts import BySizes

ROUNDS, BATCH = 3, 8
OF_TRAINER = (
    "precision",
    "max_rounds",
    "engine",
    "chunk_size",
    "local_epochs",
    "local_steps",
    "gradient_clip_val",
    "sampler",
    "work",
)
# Clients take from one to four steps in a round; one has no samples. Five votes cannot cancel, six can.
SIZES = {"unequal": (6, 24, 0, 15, 10, 31), "equal": (16, 16, 16, 16, 16, 16)}


@dataclass(frozen=True)
class Rule:
    """How a rule enters the suite.

    Attributes:
        make: Makes the aggregator from the options that all share.
        weightings: Those that it takes.
        weighs: Whether the p_i enter its step.
        memoryless: Whether its step is linear in the mean of the updates and in nothing else, so that a mask before it
            and one after it are the same.
        is_mean: Whether it is FedAvg for clients who agree as far as these do, or with the option given here.
    """

    make: Callable[..., Aggregator]
    weightings: tuple[str, ...] = ("samples", "uniform")
    weighs: bool = True
    memoryless: bool = False
    is_mean: bool = False


RULES = {
    "FedAvg": Rule(aggregators.FedAvg, memoryless=True),
    "FedAvgM": Rule(aggregators.FedAvgM),
    "FedAdagrad": Rule(partial(aggregators.FedAdagrad, lr=0.1)),
    "FedAdam": Rule(partial(aggregators.FedAdam, lr=0.1)),
    "FedYogi": Rule(partial(aggregators.FedYogi, lr=0.1)),
    "FedNova": Rule(aggregators.FedNova, memoryless=True),
    "FedLWS": Rule(partial(aggregators.FedLWS, 0.5, tau_max=2.0)),
    "FedDynServer": Rule(aggregators.FedDynServer, weightings=("uniform",)),
    "FedGMA": Rule(aggregators.FedGMA),
    "CGW": Rule(aggregators.CGW),
    "ServerOptimizer": Rule(partial(aggregators.ServerOptimizer, partial(torch.optim.Adam, lr=0.1, eps=0.1))),
    "CoordinateMedian": Rule(aggregators.CoordinateMedian, weighs=False),
    "TrimmedMean": Rule(aggregators.TrimmedMean, weighs=False),
    "Krum": Rule(aggregators.Krum, weighs=False),
    "MultiKrum": Rule(aggregators.MultiKrum, weighs=False),
    "Bulyan": Rule(partial(aggregators.Bulyan, 0), weighs=False, is_mean=True),
    "GeometricMedian": Rule(aggregators.GeometricMedian),
    "FedExP": Rule(aggregators.FedExP, is_mean=True),
    "FedACG": Rule(aggregators.FedACG),
    "SignMajority": Rule(partial(aggregators.SignMajority, lr=0.1), weighs=False),
    "TIES": Rule(aggregators.TIES, weighs=False),
    "PCGrad": Rule(aggregators.PCGrad, is_mean=True),
    "FedFV": Rule(aggregators.FedFV, is_mean=True),
    "FedMGDA": Rule(aggregators.FedMGDA),
    "FedOMG": Rule(aggregators.FedOMG),
    "FedAWA": Rule(partial(aggregators.FedAWA, 5, 0.2)),
    "FedGaLAServer": Rule(aggregators.FedGaLAServer),
    "QFedAvg": Rule(aggregators.QFedAvg),
    "TERM": Rule(aggregators.TERM),
    "AFL": Rule(aggregators.AFL, memoryless=True),
    "FedDGGA": Rule(partial(aggregators.FedDGGA, losses_over="train"), memoryless=True),
}
MASKED = [name for name in RULES if getattr(aggregators, name).mask_refusal is None]
UNMASKED = [name for name in RULES if name not in MASKED]
# A mask can come before these, as they use a mean.
AFTER_A_MASK = [name for name in MASKED if getattr(aggregators, name).needs & (Need.MEAN | Need.NORMALIZED_MEAN)]

MASKS: dict[str, Callable[[], Mask] | None] = {
    "none": None,
    "soft": lambda: SignAgreement(0.8),
    "binary": lambda: SignAgreement(0.8, binary=True),
    "samples": lambda: SignAgreement(0.8, votes="samples"),
    "above": lambda: SignAgreement(0.2, comparison=">"),
    "magnitude": lambda: MagnitudeAgreement(0.8),
    "sand": lambda: SANDMask(0.1, k=1e-4),
    "progress": lambda: MaskControl(SignAgreement(0.8), "progress"),
    "length": lambda: MaskControl(SignAgreement(0.8), "length"),
    "direction": lambda: MaskControl(SignAgreement(0.8), "direction"),
    "values": lambda: MaskControl(SignAgreement(0.8), "values"),
    "delayed": lambda: DelayedMask(SignAgreement(0.8), 1),
    "partial": lambda: PartialMask(SignAgreement(0.8), ["head"]),
}
# Masks and rules at a limit, and beside one: not part of the grid.
LIMITS: dict[str, Callable[[], Mask]] = {
    "soft at 0": lambda: SignAgreement(0.0),
    "binary at 0": lambda: SignAgreement(0.0, binary=True),
    "samples at 0": lambda: SignAgreement(0.0, votes="samples"),
    "magnitude at 0": lambda: MagnitudeAgreement(0.0),
    "above at 0": lambda: SignAgreement(0.0, comparison=">"),
    "sand at 0": lambda: SANDMask(0.0, k=1e-4),
    "progress at 0": lambda: MaskControl(SignAgreement(0.0), "progress"),
    "length at 0": lambda: MaskControl(SignAgreement(0.0), "length"),
    "direction at 0": lambda: MaskControl(SignAgreement(0.0), "direction"),
    "values at 0": lambda: MaskControl(SignAgreement(0.0), "values"),
    "delayed at 0": lambda: DelayedMask(SignAgreement(0.0), 1),
    "noise floor alone": lambda: NoiseFloorMask(3.0),
    "partial at 0": lambda: PartialMask(SignAgreement(0.0), ["head"]),
    "delayed to the end": lambda: DelayedMask(SignAgreement(0.8), ROUNDS),
    "delayed by nothing": lambda: DelayedMask(SignAgreement(0.8), 0),
    "soft at 0.2": lambda: SignAgreement(0.2),
}
SPECIAL = {
    "FedLWS at 0": Rule(partial(aggregators.FedLWS, tau_min=0.0, tau_max=0.0)),
    "FedAvgM at 0": Rule(partial(aggregators.FedAvgM, beta=0.0)),
    "FedACG at 0": Rule(partial(aggregators.FedACG, beta=0.0)),
    "FedOMG at 0": Rule(partial(aggregators.FedOMG, kappa=0.0)),
    "FedAWA at 0": Rule(partial(aggregators.FedAWA, 0)),
    "QFedAvg at 0": Rule(partial(aggregators.QFedAvg, q=0.0)),
    "TERM at 0": Rule(partial(aggregators.TERM, t=0.0)),
    "AFL at 0": Rule(partial(aggregators.AFL, gamma=0.0)),
    "FedDGGA at 0": Rule(partial(aggregators.FedDGGA, step_size=0.0, losses_over="train")),
    "FedFV at 1": Rule(partial(aggregators.FedFV, alpha=1.0, tau=0)),
    "CGW at 0": Rule(partial(aggregators.CGW, alpha=0.0)),
    "FedGMA at 0": Rule(partial(aggregators.FedGMA, server_lr=0.0)),
    "ServerOptimizer as FedAvg": Rule(aggregators.ServerOptimizer),
}


class Net(LightningModule):
    """BatchNorm, and a running centre that is subtracted in training too: a buffer that the parameters depend on.

    No bias before BatchNorm: its gradient is rounding alone, and masks would count the votes of the last bits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU())
        self.head = nn.Linear(6, 3)
        self.register_buffer("center", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers(x)
        self.center.lerp_(hidden.detach().mean(0), 0.3)
        scores: Tensor = self.head(hidden - self.center)
        return scores

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return cross_entropy(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Draws(ClientSampler):
    """Draws clients with samples, in any order."""

    def sample(self, round: int, count: int, sizes: np.ndarray, seed: int) -> np.ndarray:
        return np.random.default_rng(round).permutation(np.flatnonzero(sizes))[:count]


def make_samples(sizes: str) -> TensorDataset:
    counts, rng = SIZES[sizes], torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (sum(counts),), generator=rng)
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return TensorDataset(torch.randn(len(labels), 5, generator=rng) + labels[:, None] + 0.3 * owner[:, None], labels)


def make_data(sizes: str, batch_size: int = BATCH) -> FederatedDataModule:
    counts = SIZES[sizes]
    return FederatedDataModule(make_samples(sizes), BySizes(*counts), num_clients=len(counts), batch_size=batch_size)


@dataclass(frozen=True)
class Outcome:
    """The global model after the last round, and what was logged in it."""

    weights: Tensor
    buffers: dict[str, Tensor]
    logged: dict[str, float]


def start() -> Net:
    torch.manual_seed(7)
    return Net()


def make_trainer(
    rule: str, mask: str = "none", client: str = "none", *more: Any, clients_per_round: float = 1.0, **options: Any
) -> FederatedTrainer:
    """Makes the trainer of ``run``, with ``more`` callbacks."""
    make_mask, local = {**MASKS, **LIMITS}[mask], {**CLIENTS, **CLIENT_LIMITS, **LATE}[client]
    options = local.options(**options)
    given = {name: options.pop(name) for name in OF_TRAINER if name in options}
    options.setdefault("weighting", {**RULES, **SPECIAL}[rule].weightings[0])
    aggregator = {**RULES, **SPECIAL}[rule].make(mask=None if make_mask is None else make_mask(), **options)
    return FederatedTrainer(
        accelerator="cpu", logger=False, callbacks=[aggregator, *local.make(), *more], seed=3,
        **{"max_rounds": ROUNDS, **given}, clients_per_round=clients_per_round,
        enable_progress_bar=False, enable_checkpointing=False, default_root_dir="not-written",
    )  # fmt: skip


@cache
def run(
    rule: str,
    mask: str = "none",
    sizes: str = "unequal",
    draws: str = "all",
    client: str = "none",
    **options: Any,
) -> Outcome:
    """Trains for three rounds.

    Args:
        rule: A name of RULES or SPECIAL.
        mask: A name of MASKS or LIMITS.
        sizes: A name of SIZES.
        draws: ``all``, those with samples in another order (``filled``), or ``one`` of these.
        client: A name of CLIENTS, CLIENT_LIMITS or LATE.
        **options: Options of every aggregator, and those of the trainer named in OF_TRAINER.
    """
    net, local = start(), {**CLIENTS, **CLIENT_LIMITS, **LATE}[client]
    count = {"filled": int(np.count_nonzero(SIZES[sizes])), "one": 1}.get(draws, 1.0)
    sampler = {} if draws == "all" else {"sampler": Draws()}
    trainer = make_trainer(rule, mask, client, clients_per_round=count, **sampler, **options)
    trainer.fit(net, make_data(sizes, sum(SIZES[sizes]) if local.full_batch else BATCH))
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    # With what stays with clients, where it began, so that any two runs can be compared.
    whole = torch.nn.utils.parameters_to_vector(net.parameters()).detach().to(trainer.weights.dtype)
    weights = trainer.weights if len(trainer.weights) == len(whole) else whole
    return Outcome(weights.clone(), buffers, {k: float(v) for k, v in trainer.logged_metrics.items()})


def same(one: Outcome, other: Outcome) -> bool:
    """Whether two models agree bit for bit, buffers included."""
    pairs = [(one.weights, other.weights), *((one.buffers[name], other.buffers[name]) for name in one.buffers)]
    return all(torch.equal(a, b) for a, b in pairs)


def distance(one: Outcome, other: Outcome) -> float:
    """The largest difference of a parameter."""
    return (one.weights - other.weights).abs().max().item()
