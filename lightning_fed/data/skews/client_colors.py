"""FedCMNIST: a colour for each class, another set of them at each client."""

import numpy as np
import torch
from torch import Tensor

from lightning_fed.data.skews.base import Shown
from lightning_fed.data.skews.coloring import ColorSkew, color_maps, colored, hues_to_rgb

__all__ = ["ClientColors"]


class ClientColors(ColorSkew):
    """Every client gives each class a colour of its own, on black: within a client the colour tells the label.

    Source: the data of section 5.3 of Tenison et al., "Gradient Masked Averaging for Federated Learning", TMLR 2023
    (FedCMNIST). It says that the colour is specific to the digit, that the scheme is unique to each client, and that no
    client has the scheme of the test set. It does not say which colours are used or how they are assigned. Here the C
    classes of a client get C hues, evenly spaced on the colour circle, in the client's own order. The hues of different
    schemes differ by multiples of 1 / (C (N + 1)) of the circle for N clients, so no two schemes share a colour.

    A scheme takes 4 C bytes, its hues; colours are computed for the samples of a batch.
    """

    # Kept for a client's next batch: the last scheme, and the maps of all its classes, shape (C, 6).
    _shown = -1
    _maps = torch.empty(0)

    def make_schemes(self, generator: np.random.Generator) -> Tensor:
        """Returns the hue of each class in each scheme as a place on the circle, shape (num_clients + 1, C), int32."""
        self._shown = -1
        count, classes = self.num_clients + 1, np.arange(self.facts.classes, dtype=np.int32)
        turns = generator.permutation(count).astype(np.int32)[:, None]
        orders = generator.permuted(np.tile(classes, (count, 1)), axis=1)
        return torch.from_numpy(orders * np.int32(count) + turns)

    def colors(self, schemes: int | Tensor | tuple[Tensor, ...]) -> Tensor:
        """Computes the colours of schemes, given by number; shape (schemes, num_classes, 3), float32 in [0, 1]."""
        return hues_to_rgb(self.table[schemes], self.facts.classes * (self.num_clients + 1))  # no two hues are alike

    def transform(self, inputs: Tensor, targets: Tensor | None, scheme: int | Tensor, draws: Tensor) -> Shown:
        """Colours images of shape (B, 1, H, W) by their labels."""
        assert targets is not None
        if isinstance(scheme, Tensor):
            return colored(inputs, color_maps(self.colors((scheme, targets)), None, self.facts)), targets
        if scheme != self._shown:
            self._shown, self._maps = scheme, color_maps(self.colors(scheme), None, self.facts)
        return colored(inputs, self._maps.index_select(0, targets)), targets
