"""FedCMNIST: a colour for each class, another set of them at each client."""

import math

import numpy as np
import torch
from torch import Tensor

from lightning_fed.data.skews.coloring import ColorSkew, color_maps, colored, hues_to_rgb

__all__ = ["ClientColors"]


class ClientColors(ColorSkew):
    """Every client colours each class in a colour of its own, on black: within a client the colour tells the label.

    Source: the data of section 5.3 of Tenison et al., "Gradient Masked Averaging for Federated Learning", TMLR 2023
    (FedCMNIST). It says that the colour is specific to the digit, that the scheme is unique to each client, and that no
    client has the scheme of the test set; not which colours they are, nor how they are assigned. Here the C classes of
    a client get C hues that lie evenly around the colour circle, in an order of the client's own. The circle of one
    scheme is turned against that of every other, by multiples of 1 / (C (N + 1)) for N clients: no two schemes share a
    colour, and two have the same order of classes only if there are more schemes than orders.
    """

    def make_schemes(self, generator: np.random.Generator) -> Tensor:
        """Returns the maps of each scheme and class, shape (num_clients + 1, num_classes, 6)."""
        return color_maps(self.colors(generator), None, self.facts)

    def colors(self, generator: np.random.Generator) -> Tensor:
        """Draws the colours of each scheme and class, shape (num_clients + 1, num_classes, 3), float32 in [0, 1]."""
        count, classes = self.num_clients + 1, self.facts.num_classes
        assert classes is not None
        turns = generator.permutation(count) / (count * classes)
        hues = (_orders(count, classes, generator) / classes + turns[:, None]) % 1
        return hues_to_rgb(torch.from_numpy(hues)).to(torch.float32)

    def transform(
        self, inputs: Tensor, targets: Tensor | None, scheme: int | Tensor, draws: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Colours images of shape (B, 1, H, W) by their labels."""
        assert targets is not None
        places = targets + scheme * self.table.shape[1]
        return colored(inputs, self.table.flatten(0, 1).index_select(0, places)), targets


def _orders(count: int, classes: int, generator: np.random.Generator) -> np.ndarray:
    """Draws permutations of the classes, all different as long as there are that many, shape (count, classes)."""
    orders = generator.permuted(np.tile(np.arange(classes), (count, 1)), axis=1)
    while count <= math.factorial(classes):
        first = np.unique(orders, axis=0, return_index=True)[1]
        again = np.setdiff1d(np.arange(count), first)
        if not len(again):
            break
        orders[again] = generator.permuted(orders[again], axis=1)
    return orders
