"""CIFAR-10 and a subset of CIFAR-100 as arrays: what is known of the files, and what the data modules say of them."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lightning_fed.data import CIFAR10, CIFAR100, Arrays, Shards

pytestmark = pytest.mark.slow

FILES = ("cifar10", "cifar100_subset")


@pytest.fixture(scope="module")
def cifar_root(data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds both files; where the data come with a script that unpacks them, they are written."""
    if all((data_root / f"{name}.npz").is_file() for name in FILES):
        return data_root
    script = data_root / "unpack.py"
    if not script.is_file():
        pytest.skip(f"no {' and '.join(FILES)} as .npz files in {data_root}, and no script that unpacks them")
    made = tmp_path_factory.mktemp("cifar")
    subprocess.run([sys.executable, os.fspath(script), os.fspath(made), *FILES], check=True, capture_output=True)
    return made


def moments(images: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Mean and standard deviation of each channel in [0, 1], from counts of each brightness."""
    counts = np.zeros((3, 256))
    for part in np.array_split(images, 20):
        counts += [np.bincount(part[..., channel].ravel(), minlength=256) for channel in range(3)]
    shares, values = counts / counts.sum(axis=1, keepdims=True), np.arange(256) / 255
    means = shares @ values
    return means, np.sqrt(shares @ values**2 - means**2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "cls", "train", "test", "first", "tolerance"),
    [
        # The first labels of the official training and test batches; the subset has an order of its own.
        ("cifar10", CIFAR10, 5000, 1000, ([6, 9, 9, 4, 1, 1, 2, 7, 8, 3], [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]), 1e-4),
        ("cifar100_subset", CIFAR100, 200, 50, None, 2e-3),
    ],
)
def test_the_files_and_the_constants_of_their_data_modules(
    cifar_root: Path, file: str, cls: type[CIFAR10], train: int, test: int,
    first: tuple[list[int], list[int]] | None, tolerance: float,
) -> None:  # fmt: skip
    with np.load(cifar_root / f"{file}.npz") as arrays:
        for labels, count in ((arrays["y_train"], train), (arrays["y_test"], test)):
            assert set(np.bincount(labels).tolist()) == {count}
        if first is not None:
            assert (arrays["y_train"][:10].tolist(), arrays["y_test"][:10].tolist()) == first
        mean, std = moments(arrays["x_train"])
    assert mean == pytest.approx(cls.pixel_mean, abs=tolerance)
    assert std == pytest.approx(cls.pixel_std, abs=2 * tolerance)


def test_arrays_split_them(cifar_root: Path) -> None:
    """Through the data module: shape, range, each label with its image, and the shards of the experiments."""
    data = Arrays(
        "cifar100_subset.npz", root=cifar_root, mean=list(CIFAR100.pixel_mean), std=list(CIFAR100.pixel_std),
        num_clients=100, partitioner=Shards(10), split_seed=0, batch_size=200,
    )  # fmt: skip
    assert (data.input_shape, data.num_classes) == ((3, 32, 32), 100)
    assert data.split.sizes.tolist() == [200] * 100
    counts = data.class_counts()
    assert counts is not None
    assert counts.sum(axis=0).tolist() == [200] * 100
    assert (counts > 0).sum(axis=1).max() <= 10
    batch, labels = next(data.train_source().batches(3, torch.arange(200), seed=0))
    rows = data.split.index[3 * 200 : 4 * 200]
    with np.load(cifar_root / "cifar100_subset.npz") as arrays:
        stored, expected = arrays["x_train"][rows], arrays["y_train"][rows]
    assert labels.tolist() == expected.tolist()
    pixels = (batch.permute(0, 2, 3, 1).numpy() * CIFAR100.pixel_std + CIFAR100.pixel_mean) * 255
    np.testing.assert_allclose(pixels, stored, atol=1e-3)
