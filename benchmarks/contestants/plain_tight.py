"""A third yardstick: the loop written by hand, with as few operations in a step as torch's public loop allows."""

import torch
from torch import Tensor, nn

from benchmarks.contestants.plain import PlainFedAvg

__all__ = ["PlainTightFedAvg"]


class PlainTightFedAvg(PlainFedAvg):
    """The same loop, with gradients from ``torch.autograd.grad`` and SGD written out over all parameters at once.

    Nothing is zeroed, accumulated or looked up: a step is forward, backward and three operations on lists of tensors.

    Args:
        model: The model, trained in place.
        images: Inputs, shape (n, ...).
        labels: Classes, shape (n,).
        clients: Sample indices of each client.
        per_round: Clients drawn each round.
        batch_size: Samples in a batch; the last short one is kept.
        lr: Learning rate of the clients' SGD.
        momentum: Momentum of the clients' SGD, above 0.
    """

    def __init__(
        self, model: nn.Module, images: Tensor, labels: Tensor, clients: list[Tensor], per_round: int,
        batch_size: int, lr: float, momentum: float,
    ) -> None:  # fmt: skip
        super().__init__(model, images, labels, clients, per_round, batch_size, lr, momentum)
        self.lr, self.momentum = lr, momentum
        self.live = list(model.parameters())

    def train_client(self, client: Tensor, generator: torch.Generator) -> None:
        """Trains one client for one epoch from the global model."""
        torch._foreach_copy_(self.parameters, self.weights)
        moving: list[Tensor] = []
        order = client[torch.randperm(len(client), generator=generator)]
        for index in order.split(self.batch_size):
            loss = nn.functional.cross_entropy(self.model(self.images[index]), self.labels[index])
            gradients = torch.autograd.grad(loss, self.live)
            if moving:
                torch._foreach_mul_(moving, self.momentum)
                torch._foreach_add_(moving, gradients)
            else:
                moving = list(gradients)
            torch._foreach_add_(self.parameters, moving, alpha=-self.lr)
