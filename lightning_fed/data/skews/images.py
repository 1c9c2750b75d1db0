"""Skews of images: colours of each class, client or test set, and angles of each client."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from lightning_fed.data.skews.base import DataFacts, FeatureSkew, Shown
from lightning_fed.errors import FederatedError, expect, expect_count, expect_number

__all__ = [
    "BinaryColors", "ClassColors", "ClientColors", "ClientRotation", "ColorSkew", "color_maps", "colored",
    "hues_to_rgb",
]  # fmt: skip


class ColorSkew(FeatureSkew):
    """Base of skews that colour labelled grey images of shape (1, H, W); they become (3, H, W)."""

    needs_labels: ClassVar[bool] = True

    def check(self, facts: DataFacts) -> None:
        super().check(facts)
        facts.check_images(type(self).__name__, grey=True)

    def input_shape(self, shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return None if shape is None else (3, *shape[1:])

    def per_channel(self, values: Sequence[float] | None) -> Sequence[float] | None:
        return None if values is None else tuple(values) * 3


def color_maps(foreground: Tensor, background: Tensor | None, facts: DataFacts) -> Tensor:
    """Computes the maps that colour an image.

    With v = std x + mean in [0, 1] the brightness of a pixel, f and b the colours of foreground and background, a
    channel of the coloured image is v f + (1 - v) b, normalised by the same mean and std as the grey image was:
    ``scale x + offset`` with scale = f - b and offset = (b + (f - b) mean - mean) / std.

    Args:
        foreground: Colours in [0, 1], shape (..., 3).
        background: Colours in [0, 1] of the same shape, None for black.
        facts: Mean and std of the grey images.

    Returns:
        Scales of the three channels, then offsets, shape (..., 6).
    """
    (mean,), (std,) = facts.mean, facts.std
    scale = foreground if background is None else foreground - background
    offset = (scale - 1) * mean if background is None else scale * mean + (background - mean)
    return torch.cat([scale, _divide(offset, std)], dim=-1)


def colored(inputs: Tensor, maps: Tensor) -> Tensor:
    """Colours grey images.

    Args:
        inputs: Images, floating tensor of shape (B, 1, H, W).
        maps: Scales and offsets of each image, shape (B, 6).

    Returns:
        Images of shape (B, 3, H, W) and the dtype of ``inputs``.
    """
    maps = maps.to(inputs.dtype)[:, :, None, None]
    # Two operations, each rounded separately: a fused one may round differently at the end of a vector, so that the
    # last bit of a sample would depend on its place in the batch.
    return inputs.mul(maps[:, :3]).add_(maps[:, 3:])


def hues_to_rgb(hues: Tensor, circle: int) -> Tensor:
    """Returns the fully saturated colours of some hues, computed from whole numbers: the same on every device.

    Args:
        hues: Places on the colour circle, integers in [0, circle): 0 is red, circle / 3 green, 2 circle / 3 blue.
        circle: How many places there are.

    Returns:
        Colours in [0, 1] with largest channel 1 and smallest 0, shape (*hues, 3), float32.
    """
    primaries = torch.arange(0, 6 * circle, 2 * circle, device=hues.device)
    distance = hues[..., None].to(torch.int64) * 6 - primaries
    distance = (distance + 3 * circle) % (6 * circle) - 3 * circle  # in [-3, 3) circle, along it
    return _divide((2 * circle - distance.abs()).clamp(0, circle).to(torch.float32), circle)


def _divide(values: Tensor, number: float) -> Tensor:
    # CUDA multiplies by the reciprocal of a number instead of dividing by it.
    return values / torch.full((1,), number, dtype=values.dtype, device=values.device)


class ClientColors(ColorSkew):
    """Every client gives each class a colour of its own, on black: within a client the colour tells the label.

    Source: the data of section 5.3 of Tenison et al., "Gradient Masked Averaging for Federated Learning", TMLR 2023
    (FedCMNIST). It says that the colour is specific to the digit, that the scheme is unique to each client, and that no
    client has the scheme of the test set. It does not say which colours are used or how they are assigned. Here the C
    classes of a client get C hues, evenly spaced on the colour circle, in the client's own order. The hues of different
    schemes differ by multiples of 1 / (C (S + 1)) of the circle for S schemes of clients, so no two share a colour.

    A scheme takes 4 C bytes, its hues; colours are computed for the samples of a batch.

    Args:
        shared: Clients that have the same scheme, a divisor of their number: client i has scheme i // shared. 1 is the
            paper's.
    """

    # Kept for a client's next batch: the last scheme, and the maps of all its classes, shape (C, 6).
    _shown = -1
    _maps = torch.empty(0)

    def __init__(self, shared: int = 1) -> None:
        expect_count("--data.skew.shared", shared)
        self.shared = shared

    def make_schemes(self, generator: np.random.Generator) -> Tensor:
        """Returns the hue of each class in each scheme as a place on the circle, shape (num_clients + 1, C), int32."""
        expect(
            self.num_clients % self.shared == 0,
            f"Expected `--data.skew.shared` to be a divisor of the {self.num_clients} clients, got {self.shared}.",
        )
        self._shown = -1
        count, classes = self.num_clients // self.shared + 1, np.arange(self.facts.classes, dtype=np.int32)
        turns = generator.permutation(count).astype(np.int32)[:, None]
        orders = generator.permuted(np.tile(classes, (count, 1)), axis=1)
        hues = orders * np.int32(count) + turns
        return torch.from_numpy(np.concatenate([hues[:-1].repeat(self.shared, axis=0), hues[-1:]]))

    def colors(self, schemes: int | Tensor | tuple[Tensor, ...]) -> Tensor:
        """Computes the colours of schemes, given by number; shape (schemes, num_classes, 3), float32 in [0, 1]."""
        circle = self.facts.classes * (self.num_clients // self.shared + 1)  # no two schemes have a hue in common
        return hues_to_rgb(self.table[schemes], circle)

    def transform(self, inputs: Tensor, targets: Tensor | None, scheme: int | Tensor, draws: Tensor) -> Shown:
        assert targets is not None
        if isinstance(scheme, Tensor):
            return colored(inputs, color_maps(self.colors((scheme, targets)), None, self.facts)), targets
        if scheme != self._shown:
            self._shown, self._maps = scheme, color_maps(self.colors(scheme), None, self.facts)
        return colored(inputs, self._maps.index_select(0, targets)), targets


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
        self.flip_rate_low, self.flip_rate_high = flip_rate_low, flip_rate_high
        self.test_flip_rate, self.label_noise = test_flip_rate, label_noise
        self._maps = torch.empty(0)

    def num_classes(self, num_classes: int | None) -> int | None:
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
        self.colors_per_class, self.test_colors = colors_per_class, test_colors

    def make_schemes(self, generator: np.random.Generator) -> Tensor:
        """Returns the colours of foreground and background, first those of the classes, shape (2, colours, 3).

        All clients share one scheme, so the table does not have a row for each.
        """
        colors = generator.random(
            (2, self.facts.classes * self.colors_per_class + self.test_colors, 3), dtype=np.float32
        )
        return torch.from_numpy(colors / colors.max(axis=-1, keepdims=True))

    def transform(self, inputs: Tensor, targets: Tensor | None, scheme: int | Tensor, draws: Tensor) -> Shown:
        assert targets is not None
        known = targets[:, None] * self.colors_per_class + (draws * self.colors_per_class).to(torch.int64)
        foreign = self.table.shape[1] - self.test_colors + (draws * self.test_colors).to(torch.int64)
        if isinstance(scheme, Tensor):
            places = torch.where((scheme == self.num_clients)[:, None], foreign, known)
        else:
            places = foreign if scheme == self.num_clients else known
        foreground, background = (self.table[part].index_select(0, places[:, part]) for part in (0, 1))
        return colored(inputs, color_maps(foreground, background, self.facts)), targets


class ClientRotation(FeatureSkew):
    """Every client turns its images by an angle of its own, counter-clockwise for a positive one.

    Our reading of FedRotMNIST, which Tenison et al., "Gradient Masked Averaging for Federated Learning", TMLR 2023,
    name in the caption of Table 3 but do not define: like their FedCMNIST, but with angles instead of colours; the test
    set has an angle that no client has. The N + 1 angles are the middles of N + 1 equal parts of [-max_angle,
    max_angle], dealt to the clients and the test set at random, so any two differ by at least 2 max_angle / (N + 1).
    With the default a 6 does not look like a 9.

    Pixels are interpolated linearly; outside of the image all is black.

    Args:
        max_angle: Largest angle in degrees, above 0 and at most 180.
    """

    def __init__(self, max_angle: float = 45.0) -> None:
        expect_number("--data.skew.max_angle", max_angle, above=0, most=180)
        self.max_angle = max_angle
        self._places = torch.empty(0)
        self._black = torch.empty(0)

    def check(self, facts: DataFacts) -> None:
        """Refuses data that are no images of shape (C, H, W), or not in [0, 1], as their black is then unknown."""
        facts.check_images("ClientRotation", grey=False)

    def angles(self, generator: np.random.Generator) -> np.ndarray:
        """Deals the angles of all schemes in degrees, shape (num_clients + 1,), float64."""
        count = self.num_clients + 1
        return ((generator.permutation(count) + 0.5) / count * 2 - 1) * self.max_angle

    def make_schemes(self, generator: np.random.Generator) -> Tensor:
        """Returns cosine and sine of each angle, shape (num_clients + 1, 2)."""
        assert self.facts.image_shape is not None
        _, height, width = self.facts.image_shape
        # Centres of the pixels, measured in pixels from the centre of the image.
        y, x = torch.meshgrid(
            torch.arange(height) - (height - 1) / 2, torch.arange(width) - (width - 1) / 2, indexing="ij"
        )
        self._places = torch.stack([x, y])
        mean, std = torch.as_tensor(self.facts.mean), torch.as_tensor(self.facts.std)
        self._black = (-mean / std).reshape(-1, 1, 1).to(torch.float32)
        radians = np.deg2rad(self.angles(generator))
        return torch.from_numpy(np.stack([np.cos(radians), np.sin(radians)], axis=1)).to(torch.float32)

    def transform(self, inputs: Tensor, targets: Tensor | None, scheme: int | Tensor, draws: Tensor) -> Shown:
        if isinstance(scheme, Tensor):
            turns = self.table.index_select(0, scheme)[:, :, None, None]
        else:
            turns = self.table[scheme, None, :, None, None]
        (cosine, sine), (x, y), (height, width) = turns.unbind(1), self._places, inputs.shape[2:]
        # Where each pixel is read, in units of half the image, shape (1 or B, H, W, 2). Element by element and not as a
        # matrix product, whose rounding depends on the size of the batch.
        read_x = (cosine * x - sine * y) * (2 / width)
        read_y = (sine * x + cosine * y) * (2 / height)
        grid = torch.stack([read_x, read_y], dim=-1).to(inputs.dtype).expand(len(inputs), -1, -1, -1)
        black = self._black.to(inputs.dtype)
        turned = grid_sample(inputs - black, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        return turned.add_(black), targets
