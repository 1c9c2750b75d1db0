"""Schemes that no two clients share, and exact colours, flips and rotations."""

import colorsys
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fed.core.seeding import Purpose, numpy_generator_for
from lightning_fed.data import BinaryColors, ClassColors, ClientColors, ClientRotation, FeatureSkew
from lightning_fed.data.skews import DataFacts
from lightning_fed.errors import FederatedError
from tests.data.skews.parts import CLASSES, N, X, Y, generator_of, prepared

# Of six classes at client 0 and in the new scheme: red, green and blue in hundredths.
COLORS = [
    [100, 100, 0, 0, 100, 100, 100, 0, 0, 100, 0, 100, 0, 0, 100, 0, 100, 0],
    [40, 100, 0, 100, 0, 40, 0, 40, 100, 60, 0, 100, 0, 100, 60, 100, 60, 0],
]


@pytest.mark.parametrize("clients", [1, 10, 500, 2000])
def test_no_two_schemes_share_a_color(clients: int) -> None:
    skew = prepared(ClientColors(), clients, classes=10)
    assert isinstance(skew, ClientColors)
    colors = skew.colors(torch.arange(clients + 1))
    assert colors.shape == (clients + 1, 10, 3)
    assert len(np.unique(colors.reshape(-1, 3), axis=0)) == 10 * (clients + 1)
    assert torch.equal(colors.amax(-1), torch.ones(clients + 1, 10))
    assert torch.equal(colors.amin(-1), torch.zeros(clients + 1, 10))
    hues = np.array([[colorsys.rgb_to_hsv(*color)[0] for color in scheme] for scheme in colors[:50].tolist()])
    gaps = np.diff(np.sort(hues, axis=1), axis=1)
    assert np.allclose(gaps, 0.1, atol=1e-5), "the colours of a client lie evenly around the circle"
    orders = np.argsort(hues, axis=1)
    start = np.argmax(orders == 0, axis=1)
    turned = np.stack([np.roll(order, -first) for order, first in zip(orders, start, strict=True)])
    assert len(np.unique(turned, axis=0)) > 0.9 * len(turned), "in orders of their own"


@pytest.mark.parametrize("shared", [2, 5, 10])
def test_groups_of_clients_share_a_scheme_that_no_other_group_has(shared: int) -> None:
    skew = prepared(ClientColors(shared=shared), 10, classes=10)
    assert isinstance(skew, ClientColors)
    colors = skew.colors(torch.arange(11))
    groups = [[scheme.tolist() for scheme in colors[first : first + shared]] for first in range(0, 10, shared)]
    assert all(scheme == group[0] for group in groups for scheme in group)
    own = np.array([group[0] for group in groups] + [colors[10].tolist()]).reshape(-1, 3)
    hues = np.sort([[colorsys.rgb_to_hsv(*color)[0] for color in group[0]] for group in groups])
    assert np.allclose(np.diff(hues), 0.1, atol=1e-5), "evenly around the circle"
    assert len(np.unique(own, axis=0)) == 10 * (10 // shared + 1)
    with pytest.raises(FederatedError, match=f"`--data.skew.shared` to be a divisor of the 11 clients, got {shared}"):
        prepared(ClientColors(shared=shared), 11)


@pytest.mark.parametrize("classes", [3, 10])
def test_every_order_of_classes_is_as_likely_as_any_other(classes: int) -> None:
    """Which class comes first, over 3,000 schemes; a chance of a false alarm below 1e-5."""
    table = prepared(ClientColors(), 2999, classes=classes).table
    assert torch.equal((table // 3000).sort(dim=1).values, torch.arange(classes).expand(3000, -1))
    first = np.bincount(table[:, 0] // 3000, minlength=classes)
    assert np.abs(first - 3000 / classes).max() < 5 * math.sqrt(3000 / classes)


@pytest.mark.parametrize(("clients", "classes"), [(1_000_000, 10), (24, 4), (2, 2), (5, 1), (3, 300)])
def test_any_number_of_clients_has_colors_of_its_own(clients: int, classes: int) -> None:
    """More schemes than there are orders of the classes, and a million of them in 4 bytes for each class."""
    skew = prepared(ClientColors(), clients, classes=classes)
    assert isinstance(skew, ClientColors)
    assert (skew.table.dtype, skew.table.shape) == (torch.int32, (clients + 1, classes))
    colors = skew.colors(torch.arange(max(0, clients - 100), clients + 1)).flatten(0, 1)
    assert len(np.unique(colors, axis=0)) == len(colors)


@pytest.mark.parametrize(("clients", "max_angle"), [(1, 45.0), (10, 30.0), (500, 45.0), (2000, 180.0)])
def test_no_two_schemes_share_an_angle(clients: int, max_angle: float) -> None:
    skew = prepared(ClientRotation(max_angle), clients)
    assert isinstance(skew, ClientRotation)
    angles = skew.angles(np.random.default_rng(0))
    assert angles.shape == (clients + 1,)
    assert np.abs(angles).max() < max_angle
    assert np.diff(np.sort(angles)).min() == pytest.approx(2 * max_angle / (clients + 1))
    assert len(np.unique(skew.table, axis=0)) == clients + 1


def test_schemes_are_those_of_the_first_release() -> None:
    """Schemes are part of a run's reproducibility: a seed gives the same ones in every version."""
    angles = prepared(ClientRotation(), 4)
    assert isinstance(angles, ClientRotation)
    found = angles.angles(numpy_generator_for(0, Purpose.SKEW))
    assert found.tolist() == pytest.approx([-36, 36, 0, -18, 18])
    assert prepared(BinaryColors(), 4).table.tolist() == pytest.approx([0.1125, 0.1625, 0.1875, 0.1375, 0.9])
    colors = prepared(ClientColors(), 4)
    assert isinstance(colors, ClientColors)
    assert colors.colors(torch.tensor([0, 4])).flatten(1).mul(100).round().tolist() == COLORS


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.1307, 0.3081)])
def test_colors_follow_the_formula(mean: float, std: float) -> None:
    facts: dict[str, Any] = {"mean": (mean,), "std": (std,)}
    for skew in (prepared(ClientColors(), **facts), prepared(ClassColors(), **facts)):
        draws = skew.draws("train", N)
        for scheme in (2, 4, torch.arange(N) % 5):
            colored, labels = skew.apply([(X - mean) / std, Y], scheme, draws)
            assert torch.equal(labels, Y)
            fore, back = expected_colors(skew, torch.as_tensor(scheme).expand(N), draws)
            expected = X.double() * fore[:, :, None, None] + (1 - X.double()) * back[:, :, None, None]
            assert torch.allclose(colored.double(), (expected - mean) / std, atol=1e-5)


def expected_colors(skew: FeatureSkew, schemes: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """The colours of each sample's foreground and background, one by one; scheme 4 is that of no client."""
    if isinstance(skew, ClientColors):
        return skew.colors(schemes)[torch.arange(N), Y].double(), torch.zeros(N, 3, dtype=torch.float64)
    places = [
        [int(y) * 2 + int(u * 2) if scheme < 4 else 2 * CLASSES + int(u * 10) for y, u, scheme in samples]
        for samples in (zip(Y, draws[:, part], schemes, strict=True) for part in (0, 1))
    ]
    return skew.table[0, places[0]].double(), skew.table[1, places[1]].double()


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 12, 20)])
def test_rotation_equals_torchvision(shape: tuple[int, ...]) -> None:
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2.functional import rotate

    x = torch.rand(5, *shape, generator=torch.Generator().manual_seed(1))
    mean, std = (0.3, 0.4, 0.5)[: shape[0]], (0.2, 0.3, 0.4)[: shape[0]]
    normal = [torch.tensor(values).reshape(-1, 1, 1) for values in (mean, std)]
    skew = ClientRotation(90.0).prepare(3, 0, DataFacts(x[0], None, mean, std))
    angles = skew.angles(generator_of(skew))
    each = torch.tensor([3, 0, 1, 2, 0])
    turned = skew.apply([(x - normal[0]) / normal[1]], each, torch.empty(5, 0))[0]
    for row, scheme in enumerate(each.tolist()):
        expected = rotate(x[row : row + 1], float(angles[scheme]), InterpolationMode.BILINEAR, fill=0.0)
        brightness = turned[row] * normal[1] + normal[0]
        inside = rotate(torch.ones_like(x[:1]), float(angles[scheme]), InterpolationMode.BILINEAR, fill=0.0)[0] > 0.999
        assert torch.allclose(brightness[inside], expected[0][inside], atol=1e-4)
        assert brightness.min() >= -1e-5, "what comes from outside is black, not grey"


def test_a_quarter_turn_is_exact_and_counter_clockwise() -> None:
    x = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    skew = ClientRotation(180.0).prepare(1, 0, DataFacts(x[0], None))
    assert sorted(skew.angles(generator_of(skew)).tolist()) == [-90.0, 90.0]
    angle = skew.angles(generator_of(skew))[0]
    [turned] = skew.apply([x], 0, torch.empty(3, 0))
    assert torch.allclose(turned, torch.rot90(x, 1 if angle > 0 else -1, dims=(2, 3)), atol=1e-5)


def test_binary_labels_and_flips() -> None:
    skew = prepared(BinaryColors(0.25, 0.25, 1.0, label_noise=0.5), 3)
    draws = torch.tensor([[0.9, 0.9], [0.9, 0.1], [0.1, 0.9], [0.1, 0.1]])
    targets = torch.tensor([0, 2, 3, 5])
    x = torch.ones(4, 1, 2, 2)
    colored, labels = skew.apply([x, targets], 0, draws)
    assert labels.tolist() == [0, 0, 0, 0]
    assert colored[:, :, 0, 0].tolist() == [[1, 0, 0], [0, 1, 0], [1, 0, 0], [0, 1, 0]]
    colored, labels = skew.apply([x, targets], 3, torch.full((4, 2), 0.99))
    assert labels.tolist() == [0, 0, 1, 1]
    assert colored[:, :, 0, 0].tolist() == [[0, 1, 0], [0, 1, 0], [1, 0, 0], [1, 0, 0]]


def test_flip_rates_are_spread_over_their_range() -> None:
    rates = prepared(BinaryColors(), 10).table
    assert np.allclose(np.sort(rates[:10]), 0.105 + 0.01 * np.arange(10))
    assert rates[10] == pytest.approx(0.9)
    assert prepared(BinaryColors(), 1).table.tolist() == pytest.approx([0.15, 0.9])


def test_draws_of_a_row_depend_on_seed_name_and_row_alone() -> None:
    skew = prepared(BinaryColors())
    draws = skew.draws("train", 50)
    assert draws.shape == (50, 2)
    assert torch.equal(skew.draws("train", 30), draws[:30])
    for other in (skew.draws("test", 50), prepared(BinaryColors(), seed=1).draws("train", 50)):
        assert not torch.isclose(other, draws).any()
    assert prepared(BinaryColors(), clients=9).draws("train", 50).equal(draws)


def test_seen_schemes_are_spread_as_the_training_samples() -> None:
    """A class is seen only in the schemes of clients that hold it; sizes count. Chance of a false alarm below 1e-6."""
    owners = np.array([0] * 10 + [1] * 30 + [2] * 40)
    held = np.array([0] * 40 + [1] * 40)
    skew = prepared(ClientColors(), 3)
    targets = np.arange(8000) % 3
    clients = skew.clients("test", targets, owners, held)
    assert set(clients[targets == 1]) == {2}
    share = (clients[targets == 0] == 0).mean()
    assert set(clients[targets == 0]) == {0, 1}
    assert abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 2667)
    assert set(clients[targets == 2]) == {0, 1, 2}, "a class that nobody holds is spread over all"
    assert np.array_equal(skew.clients("test", targets[:100], owners, held), clients[:100])
    unknown = skew.clients("test", 8000, owners, held)
    assert abs((unknown == 2).mean() - 0.5) < 5 * math.sqrt(0.25 / 8000)
