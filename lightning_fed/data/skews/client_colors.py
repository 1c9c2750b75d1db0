"""FedCMNIST: a colour for each class, another set of them at each client."""

import math

import numpy as np
import torch
from torch import Tensor

from lightning_fed.data.skews.coloring import ColorSkew, color_maps, colored, hues_to_rgb
from lightning_fed.data.skews.orders import decode_orders, draw_orders
from lightning_fed.errors import FederatedError

__all__ = ["ClientColors"]


class ClientColors(ColorSkew):
    """Every client colours each class in a colour of its own, on black: within a client the colour tells the label.

    Source: the data of section 5.3 of Tenison et al., "Gradient Masked Averaging for Federated Learning", TMLR 2023
    (FedCMNIST). It says that the colour is specific to the digit, that the scheme is unique to each client, and that no
    client has the scheme of the test set; not which colours they are, nor how they are assigned. Here the C classes of
    a client get C hues that lie evenly around the colour circle, in an order of the client's own. The circle of one
    scheme is turned against that of every other, by multiples of 1 / (C (N + 1)) for N clients: no two schemes share a
    colour or an order of classes.

    A scheme takes 16 bytes (up to 20 classes), the numbers of its turn and of its order; colours are computed for the
    samples of a batch.
    """

    # The scheme whose maps were computed last, for a client's next batch: all of its classes, shape (C, 6).
    _shown = -1
    _maps = torch.empty(0)

    def make_schemes(self, generator: np.random.Generator) -> Tensor:
        """Returns the turn of each scheme in units of the smallest one, then its order; int64.

        The shape is (num_clients + 1, 2), with further columns for the orders of more than 20 classes.

        Raises:
            FederatedError: If there are more schemes than orders of the classes.
        """
        count, classes = self.num_clients + 1, self._classes
        if count > math.factorial(classes):
            raise FederatedError(
                f"Expected at most {math.factorial(classes) - 1} clients for `--data.skew ClientColors` with {classes} "
                f"classes, whose colors have a different order at each client and in the new scheme, got "
                f"{self.num_clients}: lower `--data.num_clients`, or choose another skew."
            )
        self._shown = -1
        turns = generator.permutation(count)[:, None]
        return torch.from_numpy(np.concatenate([turns, draw_orders(count, classes, generator)], axis=1))

    def colors(self, schemes: Tensor) -> Tensor:
        """Computes the colours of some schemes, shape (schemes, num_classes, 3), float32 in [0, 1].

        Args:
            schemes: Their numbers, shape (schemes,), int64.
        """
        return hues_to_rgb(self._hues(schemes), self._circle)

    def transform(
        self, inputs: Tensor, targets: Tensor | None, scheme: int | Tensor, draws: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Colours images of shape (B, 1, H, W) by their labels."""
        assert targets is not None
        if isinstance(scheme, Tensor):
            hues = self._hues(scheme).gather(1, targets[:, None])[:, 0]
            return colored(inputs, color_maps(hues_to_rgb(hues, self._circle), None, self.facts)), targets
        if scheme != self._shown:
            colors = self.colors(torch.full((1,), scheme, device=self.table.device))
            self._shown, self._maps = scheme, color_maps(colors[0], None, self.facts)
        return colored(inputs, self._maps.index_select(0, targets)), targets

    @property
    def _classes(self) -> int:
        assert self.facts.num_classes is not None
        return self.facts.num_classes

    @property
    def _circle(self) -> int:
        """Number of hues in all schemes together, no two alike."""
        return self._classes * (self.num_clients + 1)

    def _hues(self, schemes: Tensor) -> Tensor:
        """Computes the hues of each class as places on the circle, shape (schemes, num_classes), int64."""
        rows = self.table.index_select(0, schemes)
        return decode_orders(rows[:, 1:], self._classes) * (self.num_clients + 1) + rows[:, :1]
