"""FEMNIST: both forms of its files, which writers take part, and who is in which test set."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_fed.data import FEMNIST, IID
from lightning_fed.errors import FederatedError
from tests.user_files import images_of, write_femnist, write_leaf


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_femnist(tmp_path_factory.mktemp("leaf"), users=12)


def inputs_and_labels(dataset: Any) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(dataset, TensorDataset)
    inputs, labels = dataset.tensors
    return inputs, labels


def test_every_writer_is_a_client(root: Path) -> None:
    data = FEMNIST(root=root, split_seed=0, batch_size=5)
    assert data.split.num_clients == 12
    assert (data.num_classes, data.input_shape) == (62, (1, 28, 28))
    source = data.train_source()
    for client in range(12):
        ((images, labels),) = source.batches(client, torch.arange(5), seed=0)
        entry = images_of(client)
        pixels = torch.tensor(entry["x"]).reshape(-1, 1, 28, 28)
        assert torch.allclose(images, (pixels - 0.9637) / 0.1592, atol=1e-5)
        assert labels.tolist() == entry["y"]


def test_digits_alone(tmp_path: Path) -> None:
    root = write_femnist(tmp_path)
    data = FEMNIST(root=root, digits_only=True, split_seed=0)
    entries = [images_of(client) for client in range(40)]
    written = [[label for label in entry["y"] if label < 10] for entry in entries]
    kept = [labels for labels in written if labels]  # writers of letters alone are no clients
    assert 0 < len(kept) < 40
    assert data.split.sizes.tolist() == [len(labels) for labels in kept]
    assert (data.num_classes, data.input_shape) == (10, (1, 28, 28))
    datasets = data.load_datasets()
    images, labels = inputs_and_labels(datasets.train)
    pixels = [x for entry in entries for x, y in zip(entry["x"], entry["y"], strict=True) if y < 10]
    assert torch.allclose(images.flatten(1), (torch.tensor(pixels) - 0.9637) / 0.1592, atol=1e-5)
    assert labels.tolist() == sum(kept, [])
    assert isinstance(datasets.test, dict)
    unseen = [label for i in range(31) for label in images_of(100 + i, 2)["y"] if label < 10]
    assert unseen
    assert inputs_and_labels(datasets.test["unseen"])[1].tolist() == unseen
    assert data.split_hash != FEMNIST(root=root, split_seed=0).split_hash


def test_digits_alone_of_letters(tmp_path: Path) -> None:
    np.savez(tmp_path / "writers.npz", **_arrays(labels=np.arange(20, 24)))
    with pytest.raises(FederatedError, match=r"Expected digits in .* set `--data\.digits_only false`"):
        FEMNIST(tmp_path / "writers.npz", digits_only=True).setup()


def test_other_writers_make_the_test_set_unseen(root: Path) -> None:
    test = FEMNIST(root=root, split_seed=0).load_datasets().test
    assert isinstance(test, dict)
    assert list(test) == ["unseen"]
    assert inputs_and_labels(test["unseen"])[1].tolist() == [
        label for i in range(12) for label in images_of(100 + i, 2)["y"]
    ]


def test_the_same_writers_make_the_test_set(tmp_path: Path) -> None:
    write_femnist(tmp_path, users=12, unseen=False)
    _, labels = inputs_and_labels(FEMNIST(root=tmp_path).load_datasets().test)
    assert len(labels) == 24
    chosen = FEMNIST(root=tmp_path, num_clients=5).load_datasets()
    assert len(inputs_and_labels(chosen.test)[1]) == 10  # only of the writers that take part
    write_leaf(tmp_path / "femnist" / "test" / "more.json", {"new": images_of(7, 3)})
    both = FEMNIST(root=tmp_path, num_clients=5).load_datasets().test
    assert isinstance(both, dict)
    assert {name: len(part) for name, part in both.items()} == {"test": 10, "unseen": 3}


def test_writers_are_drawn_by_a_seed_of_their_own(root: Path) -> None:
    drawn = [
        FEMNIST(root=root, num_clients=5, split_seed=seed, draw_seed=draw) for seed, draw in ((0, 0), (1, 0), (0, 1))
    ]
    first, same, other = (inputs_and_labels(data.load_datasets().train)[1].tolist() for data in drawn)
    assert first == same != other
    assert [data.split.num_clients for data in drawn] == [5, 5, 5]
    assert FEMNIST(root=root, num_clients=12).load_datasets().users.tolist() == np.repeat(np.arange(12), 5).tolist()


def test_another_partitioner_takes_all_writers_or_a_number_of_them(root: Path) -> None:
    data = FEMNIST(root=root, partitioner=IID(), num_clients=4, split_seed=0)
    assert data.split.sizes.tolist() == [15] * 4
    data = FEMNIST(root=root, partitioner=IID(), num_clients=4, num_users=8, split_seed=0)
    assert data.split.sizes.tolist() == [10] * 4


@pytest.mark.parametrize("form", ["bytes.npz", "floats.pt", "flat.npz"])
def test_arrays_with_writers(tmp_path: Path, form: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 28, 28)).astype(np.uint8)
    arrays: dict[str, Any] = {
        "images": pixels, "labels": np.array([3, 61, 0, 1, 2, 3]), "writers": np.array([9, 4, 4, 9, 4, 7]),
        "test_images": pixels[:3], "test_labels": np.array([1, 2, 3]), "test_writers": np.array([4, 5, 7]),
    }  # fmt: skip
    if form != "bytes.npz":
        arrays["images"], arrays["test_images"] = pixels / np.float32(255), pixels[:3].reshape(3, 784) / np.float32(255)
    if form == "floats.pt":
        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, tmp_path / form)
    else:
        np.savez(tmp_path / form, **arrays)
    data = FEMNIST(tmp_path / form, mean=0.5, std=0.25, split_seed=0)
    datasets = data.load_datasets()
    images, labels = inputs_and_labels(datasets.train)
    assert torch.allclose(images.squeeze(1), (torch.from_numpy(pixels) / 255 - 0.5) / 0.25, atol=1e-5)
    assert (labels.tolist(), datasets.users.tolist()) == ([3, 61, 0, 1, 2, 3], [2, 0, 0, 2, 0, 1])
    assert data.split.sizes.tolist() == [3, 1, 2]
    assert isinstance(datasets.test, dict)
    assert inputs_and_labels(datasets.test["test"])[1].tolist() == [1, 3]
    assert inputs_and_labels(datasets.test["unseen"])[1].tolist() == [2]


def _arrays(**changes: Any) -> dict[str, Any]:
    arrays = {"images": np.zeros((4, 28, 28)), "labels": np.arange(4), "writers": np.arange(4)}
    return {name: array for name, array in (arrays | changes).items() if array is not None}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"writers": None}, "Expected an array named writers in "),
        ({"writers": np.arange(3)}, "one label and one writer, whole numbers, for each image of "),
        ({"writers": np.arange(4) / 2}, "one label and one writer, whole numbers, for each image of "),
        ({"images": np.zeros((4, 32, 32))}, "got samples of shape (32, 32)"),
        ({"images": np.zeros((0, 784)), "labels": np.arange(0), "writers": np.arange(0)}, "Expected images in "),
        ({"images": np.full((4, 784), 255.0)}, "got user 0, values from 255.0 to 255.0"),
        ({"images": np.full((4, 784), np.nan)}, "got user 0, values from nan to nan"),
        ({"labels": np.arange(59, 63)}, "Expected labels from 0 to 61 in "),
        ({"labels": np.arange(-1, 3)}, "got -1: change"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    np.savez(tmp_path / "writers.npz", **_arrays(**changes))
    with pytest.raises(FederatedError, match=r"`--data\.path`") as caught:
        FEMNIST(tmp_path / "writers.npz").setup()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_clients": 13}, "Expected `--data.num_clients` to be at most 12"),
        ({"num_users": 13}, "Expected `--data.num_users` to be at most 12"),
        ({"num_users": 0}, "Expected `--data.num_users` to be an integer of at least 1"),
        ({"draw_seed": -1}, "Expected `--data.draw_seed`"),
        ({"std": 0.0}, "Expected `--data.std` to be a finite number above 0"),
        ({"path": "nowhere"}, "Expected the file or folder "),
    ],
)
def test_options_out_of_range(root: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(FederatedError) as caught:
        FEMNIST(**{"root": root, **options}).setup()
    assert words in str(caught.value)
