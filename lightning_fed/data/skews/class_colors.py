"""Coloured MNIST: colours that predict the label at every client, and mislead in the test set."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_fed.data.skews.base import Shown
from lightning_fed.data.skews.coloring import ColorSkew, color_maps, colored
from lightning_fed.errors import FederatedError, expect_count, expect_number

__all__ = ["BinaryColors", "ClassColors"]


class BinaryColors(ColorSkew):
    """Two labels and two colours: red for the lower half of the classes, green for the upper, but some are flipped.

    The recipe is that of Arjovsky et al., "Invariant Risk Minimization", 2019 (arXiv:1907.02893): the label is whether
    the digit is 5 or above, flipped with probability ``label_noise``; the colour is that of the label, flipped with the
    client's probability. The rates are those of the workshop paper on FedGMA (Tenison et al., "Gradient-Masked
    Federated Optimization", 2021): between 0.1 and 0.2 at the clients, here evenly spaced and dealt at random, and 0.9
    in the test set, where colours thus point the wrong way. That paper does not mention noisy labels; Arjovsky et al.
    flip 25 %, so that colour predicts better than shape. Their images have 14 x 14 pixels and two channels; here the
    size stays, and the third channel is empty.

    Args:
        flip_rate_low: Lowest probability of a flipped colour at a client, in [0, 1].
        flip_rate_high: Highest probability of a flipped colour at a client, in [0, 1].
        test_flip_rate: The probability in the scheme that no client has; outside of the clients' range.
        label_noise: Probability that a label is flipped, at clients and in the test set, in [0, 1].
    """

    num_draws: ClassVar[int] = 2

    def __init__(
        self,
        flip_rate_low: float = 0.1,
        flip_rate_high: float = 0.2,
        test_flip_rate: float = 0.9,
        label_noise: float = 0.0,
    ) -> None:
        rates = {
            "flip_rate_low": flip_rate_low, "flip_rate_high": flip_rate_high, "test_flip_rate": test_flip_rate,
            "label_noise": label_noise,
        }  # fmt: skip
        for name, rate in rates.items():
            expect_number(f"--data.skew.{name}", rate, least=0, most=1)
        if flip_rate_low > flip_rate_high or flip_rate_low <= test_flip_rate <= flip_rate_high:
            raise FederatedError(
                "Expected `--data.skew.flip_rate_low` to be at most `--data.skew.flip_rate_high`, and "
                "`--data.skew.test_flip_rate` not to lie between them, since no client has it, got "
                f"{flip_rate_low}, {flip_rate_high} and {test_flip_rate}."
            )
        self.flip_rate_low = flip_rate_low
        self.flip_rate_high = flip_rate_high
        self.test_flip_rate = test_flip_rate
        self.label_noise = label_noise
        self._maps = torch.empty(0)

    def num_classes(self, num_classes: int | None) -> int | None:
        """Returns 2."""
        return 2

    def class_names(self, names: Sequence[str] | None) -> Sequence[str] | None:
        """Returns the ranges of classes of the two labels, such as "0 to 4" and "5 to 9"."""
        if names is None or len(names) < 2:
            return None
        first = (len(names) + 1) // 2
        return f"{names[0]} to {names[first - 1]}", f"{names[first]} to {names[-1]}"

    def make_schemes(self, generator: np.random.Generator) -> Tensor:
        """Returns the probability of a flipped colour in each scheme, shape (num_clients + 1,)."""
        self._maps = color_maps(torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), None, self.facts)
        # The middles of equal parts, one for each client: a single client gets the middle of the range.
        share = (generator.permutation(self.num_clients) + 0.5) / self.num_clients
        rates = self.flip_rate_low + share * (self.flip_rate_high - self.flip_rate_low)
        return torch.from_numpy(np.append(rates, self.test_flip_rate)).to(torch.float32)

    def labels(self, targets: Tensor, draws: Tensor) -> Tensor:
        """Returns 0 for the lower half of the classes and 1 for the upper, some of them flipped, shape (B,)."""
        return ((targets >= (self.facts.classes + 1) // 2) ^ (draws[:, 0] < self.label_noise)).to(torch.int64)

    def transform(self, inputs: Tensor, targets: Tensor | None, scheme: int | Tensor, draws: Tensor) -> Shown:
        """Makes labels binary and colours images of shape (B, 1, H, W) red or green."""
        assert targets is not None
        labels = self.labels(targets, draws)
        colors = labels ^ (draws[:, 1] < self.table[scheme]).to(torch.int64)
        return colored(inputs, self._maps.index_select(0, colors)), labels


class ClassColors(ColorSkew):
    """Two foreground and two background colours for each class, the same at all clients; random ones in the test set.

    The recipe is that of Arpit et al., "Predicting with High Correlation Features", 2019 (arXiv:1910.00164), which the
    workshop paper on FedGMA (2021) uses. A colour is drawn uniformly from the cube and divided by its largest channel.
    A training image gets one of the two foreground and, independently, one of the two background colours of its class;
    a test image gets any of ``test_colors`` other foreground and as many other background colours, whatever its class.
    FedGMA's paper does not say whether its ten sets of test colours are pairs: as in Arpit's code, they are not. That
    code also turns the images black and white at a brightness of 150 / 255 and adds noise of deviation 10 / 255 to each
    pixel; here the brightness of a pixel blends the two colours, and there is no noise.

    Args:
        colors_per_class: Number of foreground colours of each class, and of background colours.
        test_colors: Number of foreground colours in the scheme that no client has, and of background colours.
    """

    num_draws: ClassVar[int] = 2

    def __init__(self, colors_per_class: int = 2, test_colors: int = 10) -> None:
        expect_count("--data.skew.colors_per_class", colors_per_class)
        expect_count("--data.skew.test_colors", test_colors)
        self.colors_per_class = colors_per_class
        self.test_colors = test_colors

    def make_schemes(self, generator: np.random.Generator) -> Tensor:
        """Returns the colours of foreground and background, first those of the classes, shape (2, colours, 3).

        All clients share one scheme, so the table does not have a row for each.
        """
        colors = generator.random(
            (2, self.facts.classes * self.colors_per_class + self.test_colors, 3), dtype=np.float32
        )
        return torch.from_numpy(colors / colors.max(axis=-1, keepdims=True))

    def transform(self, inputs: Tensor, targets: Tensor | None, scheme: int | Tensor, draws: Tensor) -> Shown:
        """Colours foreground and background of images of shape (B, 1, H, W)."""
        assert targets is not None
        known = targets[:, None] * self.colors_per_class + (draws * self.colors_per_class).to(torch.int64)
        foreign = self.table.shape[1] - self.test_colors + (draws * self.test_colors).to(torch.int64)
        if isinstance(scheme, Tensor):
            places = torch.where((scheme == self.num_clients)[:, None], foreign, known)
        else:
            places = foreign if scheme == self.num_clients else known
        foreground, background = (self.table[part].index_select(0, places[:, part]) for part in (0, 1))
        return colored(inputs, color_maps(foreground, background, self.facts)), targets
