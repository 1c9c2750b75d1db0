"""Federated averaging by the trainer against a plain loop, which shares only the seeds and the split, bit for bit."""

import gzip
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from lightning_fed import FederatedTrainer
from lightning_fed.aggregators import FedAvg
from lightning_fed.data import FashionMNIST, FederatedDataModule, Shards
from lightning_fed.masks import SignAgreement
from lightning_fed.models import ImageClassifier, LeNet
from lightning_fed.seeding import Purpose, generator_for, numpy_generator_for, seed_everywhere, seed_for

SEED, ROUNDS, COHORT = 5, 3, 3
SGD: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)
ADAM: Callable[..., torch.optim.Optimizer] = partial(torch.optim.Adam, lr=1e-3)


def plain_fedavg(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    clients: Sequence[np.ndarray],
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    batch_size: int,
    threshold: float | None,
) -> None:
    """Trains a plain module: every name that is not torch's is defined here, apart from the seeds."""
    images, labels = data
    params = [p for p in model.parameters() if p.requires_grad]
    model.train()
    for round in range(1, ROUNDS + 1):
        draw = numpy_generator_for(SEED, Purpose.SAMPLE, round)
        cohort = sorted(draw.choice(len(clients), size=COHORT, replace=False, shuffle=False).tolist())
        start = [p.detach().clone() for p in params]
        start_buffers = [b.clone() for b in model.buffers()]
        means = [torch.zeros_like(p) for p in start]
        signs = [torch.zeros_like(p) for p in start]
        buffers = [torch.zeros_like(b, dtype=torch.float64) for b in start_buffers]
        for client in cohort:
            with torch.no_grad():
                for live, value in zip([*params, *model.buffers()], [*start, *start_buffers], strict=True):
                    live.copy_(value)
            optimizer, rows = make_optimizer(params), torch.from_numpy(clients[client])
            seed_everywhere(seed_for(SEED, Purpose.LOCAL, round, client))
            order = torch.randperm(len(rows), generator=generator_for(SEED, Purpose.SHUFFLE, round, client))
            for batch in rows[order].split(batch_size):
                optimizer.zero_grad()
                cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
            for i, (p, w) in enumerate(zip(params, start, strict=True)):
                means[i].add_(p.detach() - w, alpha=len(rows))
                signs[i] += torch.sign(p.detach() - w)
            for total, live in zip(buffers, model.buffers(), strict=True):
                total.copy_(total + live * len(rows) if live.is_floating_point() else torch.maximum(total, live))
        samples = sum(len(clients[client]) for client in cohort)
        with torch.no_grad():
            for p, w, mean, sign in zip(params, start, means, signs, strict=True):
                agreed = sign.abs() / COHORT
                mask = torch.ones_like(w) if threshold is None else torch.where(agreed >= threshold, 1.0, agreed)
                p.copy_(w + mask * (mean / samples))
            for live, total in zip(model.buffers(), buffers, strict=True):
                live.copy_(total / samples if live.is_floating_point() else total)
