"""What is shown of a split before training: samples as the clients see them, pictures, and a few lines of text."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch.utils.data import TensorDataset

from lightning_fed.data import Arrays, Datasets, Digits, FederatedDataModule, Split
from lightning_fed.data.partitioners import Shards
from lightning_fed.data.skews import ClientColors
from lightning_fed.data.summary import (
    choose_samples,
    overview,
    sample_sheet,
    samples_figure,
    sizes_figure,
    split_figure,
    split_figures,
)
from tests.parts import OneByOne

MEAN, STD = 0.25, 0.5


class Normalised(FederatedDataModule):
    """Grey images of 4 x 6 whose brightness is (label + 1) / 10, normalised, 6 classes in 240 samples."""

    def load_datasets(self) -> Datasets:
        labels = torch.arange(240) % 6
        pixels = ((labels + 1) / 10).reshape(-1, 1, 1, 1).expand(-1, 1, 4, 6)
        train, test = TensorDataset((pixels - MEAN) / STD, labels), TensorDataset(pixels[:50], labels[:50])
        return Datasets(train, test=test, mean=(MEAN,), std=(STD,), class_names="abcdef")


def normalised(**options) -> Normalised:
    options = {"num_clients": 5, "split_seed": 0, "partitioner": Shards(2), **options}
    return Normalised(train_dataset=None, **options)


def sheet_of(data: FederatedDataModule, **options):
    return sample_sheet(data.train_source(), data.split, data.labels, data.mean, data.std, **options)


def data_of(inputs: torch.Tensor, targets: torch.Tensor, **options) -> FederatedDataModule:
    return FederatedDataModule(TensorDataset(inputs, targets), **{"num_clients": 3, "split_seed": 0, **options})


def test_samples_are_of_as_many_classes_as_the_client_has() -> None:
    labels = np.array([0] * 50 + [1] * 3 + [2] * 20)
    split = Split.of([np.random.default_rng(0).permutation(73)])
    held = labels[split.index]
    assert held[choose_samples(split, labels, 0, 8).numpy()].tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert held[choose_samples(split, labels, 0, 2).numpy()].tolist() == [0, 1]
    places = choose_samples(split, labels, 0, 1000)
    assert sorted(places.tolist()) == list(range(73))
    assert held[places.numpy()].tolist() == sorted(held.tolist())


def test_samples_without_labels_are_any() -> None:
    split = Split.of([np.arange(5), np.arange(5, 45)])
    places = choose_samples(split, None, 1, 12).tolist()
    assert len(set(places)) == 12
    assert set(places) <= set(range(40))
    assert len(choose_samples(split, None, 0, 12)) == 5


def test_sheet_shows_each_client_its_own_samples_without_the_normalisation() -> None:
    data = normalised()
    sheet = sheet_of(data, columns=6)
    assert sheet.clients.tolist() == [0, 1, 2, 3, 4]
    assert sheet.images.shape == (5, 6, 4, 6, 3)
    counts = data.class_counts()
    for client, row in zip(sheet.clients, sheet.images, strict=True):
        shown = np.round(row[:, 0, 0, 0] * 10).astype(int) - 1
        assert set(shown) == set(np.flatnonzero(counts[client]))
        np.testing.assert_allclose(row, ((shown + 1) / 10)[:, None, None, None] * np.ones((6, 4, 6, 3)), atol=1e-6)


def test_sheet_shows_some_of_many_clients_that_hold_samples() -> None:
    empty = Split.of([np.arange(0), *np.array_split(np.arange(240), 40), np.arange(0)])
    data = normalised()
    source = type(data.train_source())(data._load().tensors, empty, 8)
    sheet = sample_sheet(source, empty, data.labels, rows=4, columns=10)
    assert sheet.clients.tolist() == [1, 14, 27, 40]
    assert (sheet.images[:, 6:] == 1).all()
    assert (sheet.images[:, :6] < 1).any(axis=(1, 2, 3, 4)).all()


def test_sheet_shows_the_colours_that_a_client_trains_on() -> None:
    data = normalised(skew=ClientColors())
    sheet = sheet_of(data, columns=8)
    assert sheet.images.shape[-1] == 3
    rows = data.split.index[: data.split.offsets[1]]
    order = choose_samples(data.split, data.labels, 0, 8)
    ((inputs, labels),) = data.train_source().batches(0, order, seed=0, batch_size=8)
    np.testing.assert_allclose(sheet.images[0], (inputs * STD + MEAN).movedim(1, -1).numpy(), atol=1e-6)
    assert labels.tolist() == data.labels[rows][order.numpy()].tolist()
    plain = sheet_of(normalised(), columns=8)
    assert np.ptp(plain.images, axis=-1).max() == 0
    assert np.ptp(sheet.images, axis=-1).min(axis=(2, 3)).max() > 0.05


@pytest.mark.parametrize("in_memory", [True, False])
def test_sheet_shows_the_test_sets_of_a_skew_below_the_clients(in_memory: bool) -> None:
    data = normalised(skew=ClientColors(), in_memory=in_memory)
    state = torch.get_rng_state()
    figure = dict(split_figures(data, data.train_source()))["samples"]
    assert torch.equal(torch.get_rng_state(), state)
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["0", "1", "2", "3", "4", "test seen_schemes", "test new_scheme"]
    for row, name in enumerate(["seen_schemes", "new_scheme"], 5):
        inputs = next(iter(data.test_dataloader()[name]))[0]
        spread = [round(place) for place in np.floor(np.linspace(0, len(inputs) - 1, 10))]
        expected = (inputs[spread] * STD + MEAN).movedim(1, -1).numpy()
        tiles = [shown(figure)[row * 5 : row * 5 + 4, column * 7 : column * 7 + 6] for column in range(10)]
        np.testing.assert_allclose(tiles, expected, atol=1e-6)


def test_sheet_leaves_out_test_sets_of_other_images() -> None:
    data = normalised()
    tests = {
        "larger": [[torch.rand(3, 1, 9, 9)]],
        "none": [],
        "numbers": [[torch.rand(3)]],
        "few": [[torch.rand(2, 1, 4, 6)]],
    }
    sheet = sheet_of(data, tests=tests)
    assert sheet.tests == ("few",)
    assert sheet.images.shape == (6, 10, 4, 6, 3)
    assert (sheet.images[5, 2:] == 1).all()


@pytest.mark.parametrize(("mean", "std"), [(0.3, 0.2), ([0.1, 0.2, 0.3], None), (None, [0.5, 0.5, 2.0]), (None, None)])
def test_sheet_undoes_the_normalisation_of_a_users_arrays(mean, std, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(256, size=(20, 5, 4, 3), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", x_train=images, y_train=np.arange(20) % 2)
    data = Arrays("own.npz", root=tmp_path, mean=mean, std=std, num_clients=2, split_seed=0)
    rows = data.split.index[choose_samples(data.split, data.labels, 0, 10).numpy()]
    np.testing.assert_allclose(sheet_of(data).images[0], images[rows] / 255, atol=1e-6)


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 7])
def test_sheet_stretches_what_it_cannot_undo(channels: int) -> None:
    inputs = torch.randn(30, channels, 5, 5, generator=torch.Generator().manual_seed(0)) * 3
    sheet = sheet_of(data_of(inputs, torch.arange(30) % 3))
    assert sheet.images.shape == (3, 10, 5, 5, 3)
    assert sheet.images.min() >= 0
    assert sheet.images.max() <= 1
    if channels == 2:
        assert (sheet.images[..., 2] == 0).all()


@pytest.mark.parametrize("inputs", [torch.rand(12, 7), torch.rand(12, 3, 7), torch.arange(48).reshape(12, 1, 2, 2)])
def test_what_is_no_image_has_no_sheet(inputs: torch.Tensor) -> None:
    assert sheet_of(data_of(inputs, torch.arange(12) % 3)) is None


# Samples that are dicts, read one by one, with a random brightness.
DICTS = OneByOne(12, lambda row: {"image": torch.rand(1, 3, 3) / 2, "other": torch.ones(2)})


def test_sheet_of_samples_that_are_read_one_by_one() -> None:
    data = FederatedDataModule(DICTS, num_clients=3, split_seed=0)
    first, second = sheet_of(data), sheet_of(data)
    assert first.images.shape == (3, 10, 3, 3, 3)
    np.testing.assert_array_equal(first.images, second.images)
    assert (first.images[:, 4:] == 1).all()


def test_looking_touches_no_random_stream() -> None:
    data = FederatedDataModule(DICTS, num_clients=3, split_seed=0, targets=[0, 1] * 6)
    states = [(random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())]
    assert [name for name, _ in split_figures(data, data.train_source())] == ["split", "sizes", "samples"]
    overview(data)
    states.append((random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()))
    assert states[0] == states[1]


def test_pictures_of_numbers_are_only_the_sizes() -> None:
    data = data_of(torch.rand(12, 7), torch.rand(12))
    assert [name for name, _ in split_figures(data, data.train_source())] == ["sizes"]


def shown(figure: Figure) -> np.ndarray:
    """The first picture in a figure."""
    return np.asarray(figure.axes[0].images[0].get_array())


def test_sheet_figure_has_every_image_at_its_place(tmp_path: Path) -> None:
    sheet = sheet_of(normalised(), columns=7)
    figure = samples_figure(sheet)
    mosaic = shown(figure)
    assert mosaic.shape == (5 * 4 + 4, 7 * 6 + 6, 3)
    for row in range(5):
        for column in range(7):
            tile = mosaic[row * 5 : row * 5 + 4, column * 7 : column * 7 + 6]
            np.testing.assert_array_equal(tile, sheet.images[row, column])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["0", "1", "2", "3", "4"]
    figure.savefig(tmp_path / "samples.png")


@pytest.mark.parametrize("sizes", [[4, 4, 4], [0, 1, 2, 2], [3, 70, 1000, 5, 999], [0, 0, 7]])
def test_size_histogram_counts_every_client_once(sizes: list[int]) -> None:
    axes = sizes_figure(np.array(sizes)).axes[0]
    bars = [(bar.get_x(), bar.get_x() + bar.get_width(), bar.get_height()) for bar in axes.patches]
    assert sum(height for *_, height in bars) == len(sizes)
    for left, right, height in bars:
        assert height == sum(left < size < right for size in sizes)
    assert len(bars) <= 40
    assert ("without any" in axes.get_title()) == (0 in sizes)


@pytest.mark.parametrize("num_clients", [3, 500, 501, 1201])
def test_heatmap_of_many_clients_is_that_of_their_whole_table(num_clients: int) -> None:
    data = data_of(torch.rand(2000, 3), torch.arange(2000) % 7, num_clients=num_clients)
    figure = dict(split_figures(data, data.train_source()))["split"]
    counts, step = data.class_counts(), -(-num_clients // 500)
    whole = split_figure(counts)
    means = [counts[first : first + step].mean(axis=0) for first in range(0, num_clients, step)]
    np.testing.assert_allclose(shown(whole), means, atol=1e-12)
    np.testing.assert_allclose(shown(figure), shown(whole), atol=1e-12)
    assert figure.axes[0].get_title() == whole.axes[0].get_title() == f"{num_clients} clients × 7 classes"
    assert figure.axes[0].images[0].get_extent() == whole.axes[0].images[0].get_extent()


def test_heatmap_names_few_classes() -> None:
    counts = np.eye(4, 3, dtype=int)
    named = split_figure(counts, ["cat", "dog", "automobile"]).axes[0]
    assert [label.get_text() for label in named.get_xticklabels()] == ["cat", "dog", "automobile"]
    many = split_figure(np.ones((2, 30), dtype=int), [f"name{i}" for i in range(30)]).axes[0]
    assert "name3" not in [label.get_text() for label in many.get_xticklabels()]


def test_overview_tells_the_numbers_of_the_split() -> None:
    data = Digits(num_clients=20, split_seed=0, partitioner=Shards(1))
    lines = dict(line.split("  ", 1) for line in overview(data).splitlines())
    facts = {name: line.strip() for name, line in lines.items()}
    summary, counts = data.split_summary(), data.class_counts()
    assert facts["clients"] == "20, none of them empty"
    assert facts["training samples"] == str(counts.sum())
    sizes = counts.sum(axis=1)
    assert facts["samples per client"] == f"{sizes.min()} to {sizes.max()}, median {np.median(sizes):g}"
    assert facts["input"] == "1 × 8 × 8, 10 classes"
    assert facts["label entropy"].startswith(f"{summary['label_entropy_mean']:.3f} bits")
    assert facts["label divergence"].endswith("mean over 190 pairs of clients")
    assert facts["hash"] == data.split_hash
    assert (facts["validation"], facts["test"]) == ("144 samples", "359 samples")
    assert facts["memory"] == f"{(1797 - 359) * (64 * 4 + 8) / 2**20:.1f} MiB of training tensors"


@pytest.mark.parametrize("in_memory", [True, False])
def test_overview_of_every_test_set(in_memory: bool) -> None:
    text = overview(normalised(skew=ClientColors(), unseen_clients=1, in_memory=in_memory))
    sizes = {tuple(line.split()[:2]): line.split()[2:] for line in text.splitlines() if line.startswith("test ")}
    assert sizes.pop(("test", "unseen")) == ["48", "samples"]
    assert sizes == {("test", "seen_schemes"): ["50", "samples"], ("test", "new_scheme"): ["50", "samples"]}
    assert text.startswith("data ")
    assert any(line.split() == ["clients", "4,", "none", "of", "them", "empty"] for line in text.splitlines())


def test_overview_of_samples_without_labels() -> None:
    text = overview(FederatedDataModule(DICTS, num_clients=5, split_seed=0, test_dataset={"a": DICTS}))
    assert "label" not in text
    assert "read one by one" in text
    assert any(line.split() == ["test", "a", "12", "samples"] for line in text.splitlines())
    assert "2 to 3, median 2" in text
