"""EMNIST and CIFAR are read as torchvision reads them; floats and bytes give the same batches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed.data import CIFAR10, CIFAR100, EMNIST, MNIST
from lightning_fed.data.readers import files as image_tensors_file
from lightning_fed.errors import FederatedError
from tests.official_files import write_cifar, write_emnist
from tests.parts import same

# variant: (classes, name of the first and of the last class, label of the first class in the files)
VARIANTS = {
    "byclass": (62, "0", "z", 0),
    "bymerge": (47, "0", "t", 0),
    "balanced": (47, "0", "t", 0),
    "letters": (26, "A", "Z", 1),
    "digits": (10, "0", "9", 0),
    "mnist": (10, "0", "9", 0),
}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_emnist_equals_torchvision_but_upright(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import EMNIST as Reference

    classes, first, last, offset = VARIANTS[variant]
    write_emnist(tmp_path, variant, classes, (2, 1), monkeypatch, offset)
    data = EMNIST(variant, root=tmp_path)
    images, labels = data.read(train=False)
    reference = Reference(tmp_path, split=variant, train=False)
    assert torch.equal(images.squeeze(1), reference.data.transpose(1, 2))
    assert torch.equal(labels, reference.targets - offset)
    assert labels.unique().tolist() == list(range(classes))
    assert (data.num_classes, data.class_names[0], data.class_names[-1]) == (classes, first, last)
    if variant != "letters":  # torchvision calls the class of both cases by the lower case
        assert list(data.class_names) == reference.classes
    assert len(data.read(train=True)[1]) == 2 * classes
    assert data.mean == pytest.approx((0.1307,), abs=0.05)


BYCLASS_COUNTS = (
    "5778 6330 5869 5969 5619 5190 5705 6139 5633 5686 1062 648 1739 779 851 1440 447 521 2048 626 382 810 1485 1351 "
    "4156 1397 413 809 3508 1576 2002 796 806 432 798 464 1644 853 432 1683 4092 400 589 1479 427 317 466 2535 464 "
    "1898 466 368 505 2320 437 2965 482 468 467 470 381 451"
)


def test_the_real_emnist_byclass_test_files(data_root: Path) -> None:
    raw = data_root / "EMNIST" / "raw"
    if not list(raw.glob("emnist-byclass-test-images-*")):
        pytest.skip(f"no emnist-byclass-test files in {raw}")
    data = EMNIST("byclass", root=data_root)
    images, labels = data.read(train=False)
    assert images.shape == (116323, 1, 28, 28)
    assert np.bincount(labels.numpy()).tolist() == [int(count) for count in BYCLASS_COUNTS.split()]
    sample = images[::50].double() / 255
    assert sample.mean().item() == pytest.approx(data.pixel_mean[0], abs=0.002)
    assert sample.std().item() == pytest.approx(data.pixel_std[0], abs=0.002)
    # Upright, an "L" (label 21) has more ink in its lowest third than in its highest; on its side it would not.
    ink = images[labels == 21].double().mean(dim=(0, 1, 3))
    assert ink[19:].sum() > 1.5 * ink[:9].sum()
    if not list(raw.glob("emnist-byclass-train-images-*")):
        with pytest.raises(FederatedError, match=f"Expected the file {raw}/emnist-byclass-train-images-idx3-ubyte "):
            data.setup()


@pytest.mark.parametrize("first", [0, 2])
def test_labels_of_letters_are_checked(first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_emnist(tmp_path, "letters", 26, (1, 1), monkeypatch, first)
    said = (
        rf"labels-idx1-ubyte.gz is not the official one of EMNIST: .* from 1 to 26 .*, got 26, 26 .* to {first + 25};"
    )
    with pytest.raises(FederatedError, match=said):
        EMNIST("letters", root=tmp_path).setup()


def test_files_of_another_variant_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many images, with fewer classes: labels alone would fit."""
    write_emnist(tmp_path, "byclass", 47, (2, 1), monkeypatch)
    with pytest.raises(FederatedError, match=r"94 labels, all from 0 to 61 among them, got 94, 47 different ones"):
        EMNIST("byclass", root=tmp_path).setup()


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_each_variant_has_its_number_of_images(variant: str, tmp_path: Path) -> None:
    """As the paper's website states them."""
    with pytest.MonkeyPatch.context() as patch:
        write_emnist(tmp_path, variant, VARIANTS[variant][0], (1, 1), patch)
    counts = {
        "byclass": 697_932, "bymerge": 697_932, "balanced": 112_800, "letters": 124_800, "digits": 240_000,
        "mnist": 60_000,
    }  # fmt: skip
    tests = {"byclass": 116_323, "bymerge": 116_323, "balanced": 18_800, "letters": 20_800, "digits": 40_000}
    for train, count in ((True, counts[variant]), (False, tests.get(variant, 10_000))):
        with pytest.raises(FederatedError, match=f"one of EMNIST: expected {count} images of 28 x 28 in bytes"):
            EMNIST(variant, root=tmp_path).read(train)


@pytest.mark.parametrize("cls", [CIFAR10, CIFAR100])
def test_cifar_equals_torchvision(cls: type[CIFAR10], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    write_cifar(tmp_path, cls.title, (2, 1), monkeypatch)
    data = cls(root=tmp_path)
    for train in (True, False):
        images, labels = data.read(train)
        reference = getattr(torchvision.datasets, cls.title)(tmp_path, train=train)
        assert torch.equal(images, torch.from_numpy(reference.data).permute(0, 3, 1, 2))
        assert labels.tolist() == reference.targets
    assert data.class_names == tuple(reference.classes)
    assert data.num_classes == len(reference.classes)
    # (x / 255 - mean) / std, by another path.
    expected = torch.stack([torchvision.transforms.functional.to_tensor(image) for image in reference.data])
    expected = torchvision.transforms.functional.normalize(expected, data.mean, data.std)
    test = data.load_datasets().test
    assert torch.allclose(test.tensors[0], expected, atol=1e-6)


FOREIGN = "The file {path} is not the official one of CIFAR10 ("


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (Path.unlink, "Expected the file {path}, found none: set `--data.root` to the folder that holds "),
        (lambda path: path.write_bytes(path.read_bytes()[:-40]), FOREIGN),
        (lambda path: path.write_bytes(b"os\nsystem\n"), FOREIGN),
    ],
    ids=["missing", "truncated", "foreign"],
)
@pytest.mark.parametrize("file", ["data_batch_3", "test_batch", "batches.meta"])
def test_bad_cifar_files(
    file: str, damage: Callable[[Path], object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar(tmp_path, "CIFAR10", (1, 1), monkeypatch)
    path = tmp_path / "cifar-10-batches-py" / file
    damage(path)
    with pytest.raises(FederatedError) as caught:
        CIFAR10(root=tmp_path).setup()
    assert str(caught.value).startswith(said.format(path=path))
    assert "set `--data.download true` to fetch it" in str(caught.value)


@pytest.mark.parametrize("in_memory", [True, False])
def test_bytes_and_floats_give_the_same_batches(in_memory: bool, tmp_path: Path, monkeypatch: Any) -> None:
    write_cifar(tmp_path, "CIFAR10", (30, 3), monkeypatch)
    options: dict[str, Any] = {"root": tmp_path, "num_clients": 4, "val_fraction": 0.1, "split_seed": 0}
    floats, bytes_ = (CIFAR10(storage=storage, in_memory=in_memory, **options) for storage in ("float32", "uint8"))
    assert bytes_.load_datasets().train.tensors[0].dtype == torch.uint8
    assert floats.load_datasets().train.tensors[0].dtype == torch.float32
    assert bytes_.input_shape == floats.input_shape == (3, 32, 32)
    order = torch.randperm(int(floats.split.sizes[2]), generator=torch.Generator().manual_seed(0))
    pairs = [(floats.train_source().batches(2, order, 0), bytes_.train_source().batches(2, order, 0))]
    pairs += [(floats.val_dataloader(), bytes_.val_dataloader()), (floats.test_dataloader(), bytes_.test_dataloader())]
    for expected, batches in pairs:
        for one, other in zip(expected, batches, strict=True):
            assert one[0].dtype == torch.float32
            assert same(list(one), list(other))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_bytes_on_cuda_equal_floats_from_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path, "CIFAR10", (30, 3), monkeypatch)
    order = torch.arange(75)
    here, there = (
        CIFAR10(root=tmp_path, storage=storage, num_clients=4, split_seed=0)
        .train_source()
        .to(device)
        .batches(1, order, 0)
        for storage, device in (("float32", "cpu"), ("uint8", "cuda"))
    )
    assert all(torch.equal(one[0], other[0].cpu()) for one, other in zip(here, there, strict=True))


def test_large_sets_are_stored_as_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_emnist(tmp_path, "digits", 10, (3, 1), monkeypatch)
    data = EMNIST("digits", root=tmp_path)
    for limit, dtype in ((4 * 30 * 784, torch.float32), (4 * 30 * 784 - 1, torch.uint8)):
        monkeypatch.setattr(image_tensors_file, "_LARGE", limit)
        assert data.load_datasets().train.tensors[0].dtype == dtype


def test_impossible_options() -> None:
    with pytest.raises(FederatedError, match=r"`--data.storage` to be one of auto, float32, uint8, got 'float16'\."):
        MNIST(storage="float16")
    with pytest.raises(FederatedError, match=r"`--data.variant` to be one of byclass, .*, mnist, got 'all'\."):
        EMNIST("all")
