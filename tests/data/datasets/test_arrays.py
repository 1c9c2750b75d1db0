"""A user's own arrays: every way to name them, and what becomes of their values."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fed.data import Arrays, Shards, TensorSource
from lightning_fed.data.readers import array_files
from lightning_fed.errors import FederatedError

RANDOM = np.random.default_rng(0)
IMAGES = {part: RANDOM.integers(0, 256, (size, 6, 5)).astype(np.uint8) for part, size in (("train", 12), ("test", 7))}
LABELS = {part: np.arange(len(images)) % 3 for part, images in IMAGES.items()}
NAMED = {"x_train": IMAGES["train"], "y_train": LABELS["train"], "x_test": IMAGES["test"], "y_test": LABELS["test"]}


def write(folder: Path, name: str = "own.npz", **arrays: npt.NDArray[Any]) -> Path:
    np.savez(folder / name, **arrays)
    return folder / name


def tensors(data: Arrays, part: str = "train") -> tuple[Tensor, ...]:
    dataset = getattr(data.load_datasets(), part)
    assert type(dataset) is TensorDataset
    return dataset.tensors


def inputs_of(folder: Path, x: npt.NDArray[Any], **options: Any) -> Tensor:
    """What a model gets of stored inputs."""
    return tensors(Arrays(write(folder, x_train=x, y_train=np.zeros(len(x), dtype=int)), **options))[0]


def labels_of(folder: Path, y: npt.NDArray[Any], **options: Any) -> Tensor:
    """What a model gets of stored targets."""
    return tensors(Arrays(write(folder, x_train=np.zeros((len(y), 2)), y_train=y), **options))[1]


def test_one_file_needs_its_path_alone(tmp_path: Path) -> None:
    data = Arrays(write(tmp_path, **NAMED), num_clients=4, split_seed=0)
    for part in ("train", "test"):
        x, y = tensors(data, part)
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
        np.testing.assert_allclose(x.numpy(), IMAGES[part][:, None].astype(np.float64) / 255, rtol=1e-6)
        assert y.tolist() == LABELS[part].tolist()
    assert data.load_datasets().val is None
    assert type(data.train_source()) is TensorSource
    assert (data.input_shape, data.num_classes) == ((1, 6, 5), 3)


def test_a_validation_part_in_the_file_is_used(tmp_path: Path) -> None:
    path = write(tmp_path, **NAMED, x_val=IMAGES["test"][:2], y_val=[0, 2])
    assert tensors(Arrays(path), "val")[1].tolist() == [0, 2]
    with pytest.raises(FederatedError, match=r"`--data.val_fraction`, got both"):
        Arrays(path, val_fraction=0.5).setup()


def test_without_a_test_part_there_is_none(tmp_path: Path) -> None:
    path = write(tmp_path, x_train=IMAGES["train"], y_train=LABELS["train"])
    assert Arrays(path).test_dataloader() == []


def save_tuple(folder: Path) -> dict[str, Any]:
    for part in ("train", "test"):
        torch.save((torch.from_numpy(IMAGES[part]), torch.from_numpy(LABELS[part])), folder / f"{part}.pt")
    return {"x_train": "train.pt:0", "y_train": "train.pt:1", "x_test": "test.pt:0", "y_test": "test.pt:1"}


def save_dict(folder: Path) -> dict[str, Any]:
    torch.save({name: torch.from_numpy(array) for name, array in NAMED.items()}, folder / "own.pth")
    return {"path": "own.pth"}


def save_folder(folder: Path) -> dict[str, Any]:
    (folder / "arrays").mkdir()
    for name, array in NAMED.items():
        np.save(folder / "arrays" / f"{name}.npy", array)
    return {"path": "arrays"}


def save_single_files(folder: Path) -> dict[str, Any]:
    np.save(folder / "pixels.npy", IMAGES["train"])
    torch.save(torch.from_numpy(LABELS["train"]), folder / "labels.pt")
    write(folder, "more.npz", held=IMAGES["test"])
    write(folder, "main.npz", answers=LABELS["test"], other=LABELS["train"])
    chosen = {"x_train": "pixels.npy", "y_train": "labels.pt", "x_test": "more.npz", "y_test": "answers"}
    return {"path": "main.npz", **chosen}


def save_medmnist(folder: Path) -> dict[str, Any]:
    arrays = {f"{part}_images": IMAGES[part] for part in IMAGES} | {f"{part}_labels": LABELS[part] for part in LABELS}
    write(folder, "med.npz", **arrays)
    chosen = {
        f"{axis}_{part}": f"{part}_{kind}" for part in IMAGES for axis, kind in (("x", "images"), ("y", "labels"))
    }
    return {"path": "med.npz", **chosen}


@pytest.mark.parametrize("save", [save_tuple, save_dict, save_folder, save_single_files, save_medmnist])
@pytest.mark.parametrize("how", ["root", "environment", "current folder"])
def test_the_same_data_from_every_kind_of_file(
    save: Any, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LIGHTNING_FED_DATA", raising=False)
    if how == "environment":
        monkeypatch.setenv("LIGHTNING_FED_DATA", str(tmp_path))
    elif how == "current folder":
        monkeypatch.chdir(tmp_path)
    data = Arrays(**save(tmp_path), root=tmp_path if how == "root" else None)
    expected = Arrays(write(tmp_path, "expected.npz", **NAMED))
    for part in ("train", "test"):
        for mine, theirs in zip(tensors(data, part), tensors(expected, part), strict=True):
            assert torch.equal(mine, theirs)


def test_an_absolute_path_needs_no_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_FED_DATA", str(tmp_path / "elsewhere"))
    assert len(tensors(Arrays(write(tmp_path, **NAMED), root=tmp_path / "nowhere"))[0]) == 12


@pytest.mark.parametrize(
    ("shape", "layout", "expected"),
    [
        ((4, 6, 5), "auto", (0, None, 1, 2)),
        ((4, 6, 5, 3), "auto", (0, 3, 1, 2)),
        ((4, 6, 5, 1), "auto", (0, 3, 1, 2)),
        ((4, 3, 6, 5), "auto", (0, 1, 2, 3)),
        ((4, 3, 6, 3), "auto", (0, 1, 2, 3)),
        ((4, 6, 5, 7), "auto", (0, 1, 2, 3)),
        ((4, 6), "auto", (0, 1)),
        ((4, 3, 6, 3), "NHWC", (0, 3, 1, 2)),
        ((4, 6, 5), "as_is", (0, 1, 2)),
        ((4, 6, 5, 3), "as_is", (0, 1, 2, 3)),
    ],
)
def test_channels_of_8_bit_images(
    shape: tuple[int, ...], layout: Any, expected: tuple[int | None, ...], tmp_path: Path
) -> None:
    images = np.random.default_rng(1).integers(0, 256, shape).astype(np.uint8)
    moved = images.transpose([axis for axis in expected if axis is not None])
    if None in expected:
        moved = moved[:, np.newaxis]
    x = inputs_of(tmp_path, images, layout=layout)
    assert x.is_contiguous()
    assert x.shape == moved.shape
    np.testing.assert_allclose(x.numpy(), moved / 255.0, rtol=1e-6)


def test_floating_arrays_keep_their_dimensions_unless_told(tmp_path: Path) -> None:
    sequences = np.random.default_rng(2).normal(size=(4, 6, 3))
    assert torch.equal(inputs_of(tmp_path, sequences), torch.from_numpy(sequences.astype(np.float32)))
    assert inputs_of(tmp_path, sequences, layout="NHW").shape == (4, 1, 6, 3)


@pytest.mark.parametrize(
    ("stored", "options", "dtype", "values"),
    [
        (np.array([[0], [51]], dtype=np.uint8), {}, torch.float32, [0.0, 0.2]),
        (np.array([[0], [51]], dtype=np.uint8), {"scale": False}, torch.float32, [0.0, 51.0]),
        (np.array([[0], [51]], dtype=np.int16), {}, torch.int64, [0, 51]),
        (np.array([[0], [51]], dtype=np.uint32), {"mean": 1, "std": 2}, torch.float32, [-0.5, 25.0]),
        (np.array([[False], [True]]), {}, torch.float32, [0.0, 1.0]),
        (np.array([[0.5], [3.0]], dtype=np.float16), {"std": 2}, torch.float32, [0.25, 1.5]),
        (np.array([[0.5], [3.0]], dtype=">f8"), {}, torch.float32, [0.5, 3.0]),
        (np.array([[0], [255]], dtype=np.uint8), {"mean": 0.5, "std": 0.25}, torch.float32, [-2.0, 2.0]),
    ],
)
def test_types_and_scaling(
    stored: npt.NDArray[Any], options: dict[str, Any], dtype: torch.dtype, values: list[float], tmp_path: Path
) -> None:
    x = inputs_of(tmp_path, stored, **options)
    assert x.dtype == dtype
    assert x.flatten().tolist() == pytest.approx(values)


def test_mean_and_std_of_each_channel(tmp_path: Path) -> None:
    images = np.random.default_rng(3).integers(0, 256, (4, 6, 5, 3)).astype(np.uint8)
    mean, std = [0.1, 0.2, 0.3], [1.0, 2.0, 4.0]
    x = inputs_of(tmp_path, images, mean=mean, std=std)
    np.testing.assert_allclose(x.numpy().transpose(0, 2, 3, 1), (images / 255 - mean) / std, rtol=1e-5, atol=1e-7)


def test_an_array_that_is_used_twice_is_normalised_once_each(tmp_path: Path) -> None:
    torch.save({"x": torch.full((4, 2), 3.0), "y": torch.zeros(4)}, tmp_path / "own.pt")
    both = {"x_train": "x", "y_train": "y", "x_test": "x", "y_test": "y"}
    data = Arrays("own.pt", root=tmp_path, **both, mean=1.0).load_datasets()
    assert [float(part.tensors[0].mean()) for part in (data.train, data.test)] == [2.0, 2.0]


@pytest.mark.parametrize(
    "stored",
    [
        np.array([2, 0, 1], dtype=np.uint8), np.array([2.0, 0.0, 1.0]), np.array([[2], [0], [1]], dtype=np.int32),
        np.array([2, 0, 1], dtype=">i4"),
    ],
    ids=["bytes", "floats", "a column", "foreign byte order"],
)  # fmt: skip
def test_class_labels_in_every_form(stored: npt.NDArray[Any], tmp_path: Path) -> None:
    labels = labels_of(tmp_path, stored)
    assert labels.dtype == torch.int64
    assert labels.tolist() == [2, 0, 1]


def test_other_targets_are_left_as_they_are(tmp_path: Path) -> None:
    targets = np.array([[0.5, -1.0], [2.0, 0.0]])
    left = labels_of(tmp_path, targets, class_labels=False, num_clients=2)
    assert torch.equal(left, torch.from_numpy(targets.astype(np.float32)))
    assert labels_of(tmp_path, np.array([-3, 4], dtype=np.int8), class_labels=False).tolist() == [-3, 4]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not list what a process has mapped")
@pytest.mark.parametrize("large", [True, False])
def test_a_large_npy_file_is_mapped_and_never_changed(
    large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_files, "_LARGE", 100 if large else 10**6)
    stored = np.random.default_rng(4).normal(size=(50, 4)).astype(np.float32)
    np.save(tmp_path / "x_train.npy", stored)
    np.save(tmp_path / "y_train.npy", np.arange(50) % 5)
    content = (tmp_path / "x_train.npy").read_bytes()
    x, y = tensors(Arrays(tmp_path))
    assert (str(tmp_path / "x_train.npy") in Path("/proc/self/maps").read_text()) == large
    x.zero_()
    assert (tmp_path / "x_train.npy").read_bytes() == content
    assert torch.equal(tensors(Arrays(tmp_path))[0], torch.from_numpy(stored))
    data = Arrays(tmp_path, mean=1.0, num_clients=5, split_seed=0, batch_size=50)
    batch, _ = next(data.train_source().batches(2, torch.arange(10), seed=0))
    np.testing.assert_allclose(batch.numpy(), stored[data.split.index[20:30]] - 1, rtol=1e-6, atol=1e-7)


def test_emnist_over_47_clients_of_one_class(emnist_root: Path) -> None:
    data = Arrays("emnist47.npz", root=emnist_root, num_clients=47, partitioner=Shards(1), split_seed=0)
    assert (data.input_shape, data.num_classes) == ((1, 28, 28), 47)
    for seed in range(3):
        data.split_seed = seed
        counts = data.class_counts()
        assert counts is not None
        assert (counts > 0).sum(axis=0).tolist() == (counts > 0).sum(axis=1).tolist() == [1] * 47
        assert set(counts[counts > 0].tolist()) == {counts.sum() // 47}


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x_test": np.zeros((4, 8, 8), np.float32)}, "x_test` to hold inputs like those of `--data.x_train`"),
        ({"x_test": np.zeros((4, 9, 9), np.uint8)}, "x_test` to hold inputs like those of `--data.x_train`"),
        ({"y_test": np.array([0, 1, 2, 3])}, "test_dataset` to hold class labels from 0 to 2, as the training data do"),
    ],
    ids=["kind", "shape", "label"],
)
def test_parts_that_do_not_fit_the_training_set_are_refused(tmp_path, arrays, said):
    whole = {
        "x_train": np.zeros((6, 8, 8), np.uint8), "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": np.zeros((4, 8, 8), np.uint8), "y_test": np.array([0, 1, 2, 0]),
    }  # fmt: skip
    np.savez(tmp_path / "a.npz", **{**whole, **arrays})
    with pytest.raises(FederatedError, match=said):
        Arrays(path=tmp_path / "a.npz", num_clients=2).setup()
