"""The yardstick: federated averaging as a PyTorch loop written by hand, and nothing else.

One process, one thread, contiguous weights, non-fused SGD, ``zero_grad(set_to_none=True)``, one resident model and
optimizer, batches by index from tensors. It logs nothing and checks nothing.
"""

import time

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["PlainFedAvg"]


class PlainFedAvg:
    """Runs rounds of federated averaging.

    Args:
        model: The model, trained in place.
        images: Inputs, shape (n, ...).
        labels: Classes, shape (n,).
        clients: Sample indices of each client.
        per_round: Clients drawn each round.
        batch_size: Samples in a batch; the last short one is kept.
        lr: Learning rate of the clients' SGD.
        momentum: Momentum of the clients' SGD.
    """

    def __init__(
        self, model: nn.Module, images: Tensor, labels: Tensor, clients: list[Tensor], per_round: int,
        batch_size: int, lr: float, momentum: float,
    ) -> None:  # fmt: skip
        self.model, self.images, self.labels, self.clients = model, images, labels, clients
        self.per_round, self.batch_size = per_round, batch_size
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, fused=False)
        self.parameters = [p.data for p in model.parameters()]
        self.weights = [p.clone() for p in self.parameters]
        self.sums = [torch.zeros_like(p) for p in self.parameters]

    def train_client(self, client: Tensor, generator: torch.Generator) -> None:
        """Trains one client for one epoch from the global model."""
        for parameter, weight in zip(self.parameters, self.weights, strict=True):
            parameter.copy_(weight)
        self.optimizer.state.clear()
        order = client[torch.randperm(len(client), generator=generator)]
        for index in order.split(self.batch_size):
            self.optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(self.model(self.images[index]), self.labels[index])
            loss.backward()
            self.optimizer.step()

    def round(self, number: int) -> float:
        """Runs one round; returns its seconds."""
        started = time.perf_counter()
        drawn = np.sort(np.random.default_rng(number).choice(len(self.clients), self.per_round, replace=False))
        samples = 0
        for total in self.sums:
            total.zero_()
        for i in drawn:
            client = self.clients[i]
            generator = torch.Generator().manual_seed(1000 * number + int(i))
            self.train_client(client, generator)
            for total, parameter in zip(self.sums, self.parameters, strict=True):
                total.add_(parameter, alpha=len(client))
            samples += len(client)
        for weight, total in zip(self.weights, self.sums, strict=True):
            weight.copy_(total).div_(samples)
        return time.perf_counter() - started
