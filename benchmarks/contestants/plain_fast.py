"""A second yardstick: the loop written by hand, with what torch offers for free besides."""

import torch
from torch import Tensor, nn

from benchmarks.contestants.plain import PlainFedAvg

__all__ = ["PlainFastFedAvg"]


class PlainFastFedAvg(PlainFedAvg):
    """The same loop, on images and convolutions in the layout channels_last and with the fused SGD kernel.

    Args:
        model: The model, trained in place.
        images: Inputs, shape (n, ...); those of shape (n, C, H, W) change their layout.
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
        if images.ndim == 4:  # batches by index keep the layout of the images
            model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
        super().__init__(model, images, labels, clients, per_round, batch_size, lr, momentum)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, fused=True)
