"""The coloured and rotated sets on the real MNIST: colours are measured on pixels, not asked of the code."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fed.data import MNIST, BinaryColors, ColoredMNIST, ColoredMNISTBinary, Datasets, FedCMNIST, FedRotMNIST
from lightning_fed.data.partitioners import Shards

pytestmark = pytest.mark.slow

MEAN, STD = 0.1307, 0.3081


@pytest.fixture(scope="module")
def raw(data_root: Path) -> Datasets:
    return MNIST(root=data_root).load_datasets()


@pytest.fixture(autouse=True)
def _load_once(raw: Datasets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MNIST, "load_datasets", lambda self: raw)


def brightness(inputs: Tensor) -> Tensor:
    return inputs * STD + MEAN


def colors(inputs: Tensor) -> Tensor:
    """The colour of each image's brightest pixel over a black background, shape (B, 3), to three digits."""
    flat = brightness(inputs).flatten(2)
    peak = flat.sum(1).argmax(1)
    found = flat[torch.arange(len(flat)), :, peak]
    return (found / found.amax(1, keepdim=True) * 1000).round()


def client_batch(data: MNIST, client: int) -> tuple[Tensor, Tensor]:
    source = data.train_source()
    size = int(source.sizes[client])
    [(x, y)] = source.batches(client, torch.arange(size), 0, size)
    return x, y


def own_rows(data: MNIST, client: int) -> Tensor:
    return torch.from_numpy(data.split.index[data.split.offsets[client] : data.split.offsets[client + 1]])


def evaluated(data: MNIST, name: str) -> tuple[Tensor, Tensor]:
    loaders: Any = data.test_dataloader()
    x, y = zip(*loaders[name], strict=True)
    return torch.cat(x), torch.cat(y)


def z_score(hits: Tensor, rate: float) -> float:
    return (float(hits.double().mean()) - rate) / math.sqrt(rate * (1 - rate) / len(hits))


def flips(x: Tensor, y: Tensor) -> Tensor:
    """Whether the colour is not that of the label: red for 0, green for 1."""
    found = colors(x)
    assert set(map(tuple, found.tolist())) == {(1000, 0, 0), (0, 1000, 0)}
    return (found[:, 1] > 0) != (y == 1)


def test_binary_colors_predict_the_label_at_the_promised_rate_and_are_reversed_in_the_test_set(raw: Datasets) -> None:
    """Shares of 6,000 images of a client and 10,000 of the test set; a false alarm has a chance below 1e-5."""
    data = ColoredMNISTBinary(num_clients=10, split_seed=0)
    digits = raw.train.tensors[1]
    shares, ones = [], 0
    for client in range(10):
        x, y = client_batch(data, client)
        assert torch.equal(y, (digits[own_rows(data, client)] >= 5).to(torch.int64))
        shares.append(float(flips(x, y).double().mean()))
        ones += int(y.sum())
    rates = 0.105 + 0.01 * np.arange(10)
    errors = (np.sort(shares) - rates) / np.sqrt(rates * (1 - rates) / 6000)
    assert np.abs(errors).max() < 5, "each client has a rate of its own between 0.1 and 0.2"
    assert abs(z_score(flips(*evaluated(data, "new_scheme")), 0.9)) < 5
    assert abs(z_score(flips(*evaluated(data, "seen_schemes")), 0.15)) < 5
    counts = data.class_counts()
    assert counts is not None
    assert counts.shape == (10, 2)
    assert counts[:, 1].sum() == ones


def test_noisy_labels_and_colors_that_follow_them(raw: Datasets) -> None:
    """Shares of 6,000 and 10,000 images; a false alarm has a chance below 1e-5."""
    data = ColoredMNISTBinary(skew=BinaryColors(label_noise=0.25), num_clients=10, split_seed=0)
    x, y = client_batch(data, 3)
    noisy = (raw.train.tensors[1][own_rows(data, 3)] >= 5) != (y == 1)
    assert abs(z_score(noisy, 0.25)) < 5
    assert 0.1 - 5 * 0.004 < float(flips(x, y).double().mean()) < 0.2 + 5 * 0.006
    x, y = evaluated(data, "new_scheme")
    assert abs(z_score((raw.test.tensors[1] >= 5) != (y == 1), 0.25)) < 5
    assert abs(z_score(flips(x, y), 0.9)) < 5


@pytest.mark.parametrize("partitioner", [None, Shards(2)], ids=["all digits", "2 classes"])
def test_fedcmnist_has_a_color_for_each_digit_and_scheme(partitioner: Shards | None) -> None:
    """At a client the colour tells the digit without exception; no client has a colour of another or of the test."""
    options: dict[str, Any] = {} if partitioner is None else {"partitioner": partitioner}
    data = FedCMNIST(num_clients=100, split_seed=0, **options)
    owner: dict[tuple[float, ...], tuple[int, int]] = {}
    for client in range(100):
        x, y = client_batch(data, client)
        for color, digit in zip(map(tuple, colors(x).tolist()), y.tolist(), strict=True):
            assert owner.setdefault(color, (client, digit)) == (client, digit)
    digits = [{digit for c, digit in owner.values() if c == client} for client in range(100)]
    assert len(owner) == sum(map(len, digits))
    assert max(map(len, digits)) == 10 if partitioner is None else all(len(held) <= 4 for held in digits)
    x, y = evaluated(data, "new_scheme")
    new = dict(zip(map(tuple, colors(x).tolist()), y.tolist(), strict=True))
    assert len(new) == 10
    assert owner.keys().isdisjoint(new)
    seen, labels = evaluated(data, "seen_schemes")
    pairs = list(zip(map(tuple, colors(seen).tolist()), labels.tolist(), strict=True))
    assert all(owner[color][1] == digit for color, digit in pairs)
    assert len({owner[color][0] for color, _ in pairs}) == 100


def test_fedrotmnist_turns_the_test_set_by_an_angle_of_no_client(raw: Datasets) -> None:
    """The angle of a client is measured by comparing its images with the same images turned by torchvision."""
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2.functional import rotate

    data = FedRotMNIST(num_clients=20, split_seed=0)
    angles = (np.arange(21) + 0.5) / 21 * 90 - 45
    images, test = raw.train.tensors[0], raw.test.tensors[0]

    def measured(turned: Tensor, plain: Tensor) -> float:
        tries = [rotate(brightness(plain), float(angle), InterpolationMode.BILINEAR, fill=0.0) for angle in angles]
        fits = [float((tried - brightness(turned)).square().mean()) for tried in tries]
        assert min(fits) < 1e-8 < 1e-3 < sorted(fits)[1]
        return float(angles[int(np.argmin(fits))])

    found = [measured(client_batch(data, client)[0][:4], images[own_rows(data, client)[:4]]) for client in range(20)]
    assert len(set(found)) == 20
    [left] = set(angles) - set(found)
    assert measured(evaluated(data, "new_scheme")[0][:4], test[:4]) == left
    assert measured(evaluated(data, "seen_schemes")[0][5:6], test[5:6]) in found


def two_colors(inputs: Tensor, grey: Tensor) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    """Colours of a white pixel and of the corner, which is black, of each image."""
    peak = grey.flatten(1).argmax(1)
    flat = inputs.flatten(2)
    pairs = (brightness(part) for part in (flat[torch.arange(len(flat)), :, peak], flat[:, :, 0]))
    fore, back = (list(map(tuple, (part * 1000).round().tolist())) for part in pairs)
    return fore, back


def test_ten_class_colors_tell_the_digit_in_training_and_nothing_in_the_test_set(raw: Datasets) -> None:
    """Of images with a white pixel; a false alarm has a chance below 1e-4."""
    data = ColoredMNIST(num_clients=10, split_seed=0)
    images, test = raw.train.tensors[0], raw.test.tensors[0]
    counts: tuple[Counter[Any], Counter[Any]] = (Counter(), Counter())
    for client in range(10):
        x, y = client_batch(data, client)
        grey = images[own_rows(data, client)]
        white = brightness(grey).amax((1, 2, 3)) > 0.9999
        for part, values in zip(counts, two_colors(x[white], grey[white]), strict=True):
            part.update(zip(values, y[white].tolist(), strict=True))
    for part in counts:
        assert len({color for color, _ in part}) == len(part) == 20, "the colour tells the digit"
        for digit in range(10):
            first, second = (count for (_, owner), count in part.items() if owner == digit)
            assert abs(first - second) < 5 * math.sqrt(first + second), "each of two colours half of the time"
    x, y = evaluated(data, "new_scheme")
    white = brightness(test).amax((1, 2, 3)) > 0.9999
    for part, values in zip(counts, two_colors(x[white], test[white]), strict=True):
        kinds = sorted(set(values))
        assert len(kinds) == 10
        assert {color for color, _ in part}.isdisjoint(kinds)
        table = np.zeros((10, 10))
        np.add.at(table, ([kinds.index(color) for color in values], y[white].numpy()), 1)
        expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
        # Chi-squared with 81 degrees of freedom is above 160 with a chance of 4e-7.
        assert ((table - expected) ** 2 / expected).sum() < 160
        assert table.sum(1).min() > 0.08 * table.sum()
