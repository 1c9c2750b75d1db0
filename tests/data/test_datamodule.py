"""One suite over every data module, and what holds for some of them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from lightning_fed.data import EMNIST, FEMNIST, Arrays, BundledDataModule, Digits, FederatedDataModule, ImageDataModule
from lightning_fed.data.batch_sources import BatchSource, EvalBatches, LoaderSource, TensorSource
from lightning_fed.data.datasets.altered import ColoredMNIST, ColoredMNISTBinary, FedCMNIST, FedRotMNIST
from lightning_fed.data.datasets.color_images import CIFAR10, CIFAR100, TinyImageNet
from lightning_fed.data.datasets.leaf import Shakespeare
from lightning_fed.data.datasets.mnist import MNIST, FashionMNIST
from lightning_fed.data.loading import Datasets
from lightning_fed.data.partitioners import IID, Shards
from lightning_fed.data.skews import SkewedBatches, SkewedSource
from lightning_fed.errors import FederatedError
from lightning_fed.models import ImageClassifier, LogisticRegression
from tests.official_files import write_cifar, write_emnist, write_tiny_imagenet
from tests.parts import OneByOne, lightning_trainer
from tests.user_files import write_femnist, write_speech

X = torch.rand(60, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(60) % 6


def texts(size: int = 60, **known: Any) -> OneByOne:
    """A user's own data set: dict samples computed one by one, and perhaps targets beside them."""
    return OneByOne(size, lambda index: {"tokens": torch.full((7,), index), "label": index % 6}, **known)


class Plain(BundledDataModule):
    """A user's own data module."""

    def load_datasets(self) -> Datasets:
        return Datasets(
            train=TensorDataset(X, Y),
            test={"near": TensorDataset(X[:9], Y[:9]), "far": TensorDataset(X[9:20], Y[9:20])},
        )


# name: (input shape, training samples, test samples, classes, lowest and highest value)
FACTS: dict[str, tuple[tuple[int, ...], int, int, int, tuple[float, float]]] = {
    "digits": ((1, 8, 8), 1438, 359, 10, (0.0, 1.0)),
    "mnist": ((1, 28, 28), 60000, 10000, 10, ((0 - 0.1307) / 0.3081, (1 - 0.1307) / 0.3081)),
    "fashion": ((1, 28, 28), 60000, 10000, 10, ((0 - 0.2860) / 0.3530, (1 - 0.2860) / 0.3530)),
    "arrays": ((1, 6, 6), 60, 30, 6, ((0 - 0.5) / 0.2, (1 - 0.5) / 0.2)),
    "own": ((4,), 60, 60, 6, (float(X.min()), float(X.max()))),
    "emnist": ((1, 28, 28), 520, 52, 26, ((0 - 0.1722) / 0.3309, (1 - 0.1722) / 0.3309)),
    "cifar10": ((3, 32, 32), 300, 20, 10, ((0 - 0.4914) / 0.2470, (1 - 0.4822) / 0.2435)),
    "cifar10 as bytes": ((3, 32, 32), 300, 20, 10, ((0 - 0.4914) / 0.2470, (1 - 0.4822) / 0.2435)),
    "cifar100": ((3, 32, 32), 500, 100, 100, ((0 - 0.4865) / 0.2564, (1 - 0.4409) / 0.2762)),
    "tiny imagenet": ((3, 64, 64), 400, 200, 200, ((0 - 0.4802) / 0.2770, (1 - 0.3975) / 0.2821)),
    "femnist": ((1, 28, 28), 400, 62, 62, ((0 - 0.9637) / 0.1592, (1 - 0.9637) / 0.1592)),
    "fedcmnist": ((3, 28, 28), 60000, 10000, 10, ((0 - 0.1307) / 0.3081, (1 - 0.1307) / 0.3081)),
    "fedrotmnist": ((1, 28, 28), 60000, 10000, 10, ((0 - 0.1307) / 0.3081, (1 - 0.1307) / 0.3081)),
    "binary colors": ((3, 28, 28), 60000, 10000, 2, ((0 - 0.1307) / 0.3081, (1 - 0.1307) / 0.3081)),
    # Of the random colours of seed 3 the darkest channel is close to black, but not black.
    "class colors": ((3, 28, 28), 60000, 10000, 10, (-0.4087541, (1 - 0.1307) / 0.3081)),
    "shakespeare": ((80,), 12 * 603, 12 * 121, 81, (0, 80)),
}

IN_SHARED_FILES: dict[str, type[ImageDataModule]] = {
    "mnist": MNIST, "fashion": FashionMNIST, "fedcmnist": FedCMNIST, "fedrotmnist": FedRotMNIST,
    "binary colors": ColoredMNISTBinary, "class colors": ColoredMNIST,
}  # fmt: skip


@pytest.fixture(scope="module", params=list(FACTS))
def module(request: pytest.FixtureRequest) -> tuple[str, FederatedDataModule]:
    options: dict[str, Any] = {"num_clients": 12, "partitioner": Shards(2), "val_fraction": 0.1, "split_seed": 3}
    if request.param == "digits":
        return "digits", Digits(**options)
    if request.param == "own":
        return "own", FederatedDataModule(TensorDataset(X, Y), test_dataset=TensorDataset(X, Y), **options)
    if request.param == "arrays":
        path = request.getfixturevalue("tmp_path_factory").mktemp("arrays") / "own.npz"
        images = (np.arange(60 * 36) % 256).astype(np.uint8).reshape(60, 6, 6)
        np.savez(path, x_train=images, y_train=Y, x_test=images[:30], y_test=Y[:30])
        return "arrays", Arrays(path, mean=0.5, std=0.2, **options)
    if request.param in IN_SHARED_FILES:
        return request.param, IN_SHARED_FILES[request.param](root=request.getfixturevalue("data_root"), **options)
    root = request.getfixturevalue("tmp_path_factory").mktemp("files")
    if request.param == "femnist":
        return "femnist", FEMNIST(root=write_femnist(root, users=40, samples=10, unseen=False), **options)
    if request.param == "shakespeare":
        return "shakespeare", Shakespeare(write_speech(root / "roles.json"), test_fraction=0.25, **options)
    return request.param, image_set(request.param, root, request.getfixturevalue("module_patch"), options)


@pytest.fixture(scope="module")
def module_patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def image_set(name: str, root: Path, patch: pytest.MonkeyPatch, options: dict[str, Any]) -> FederatedDataModule:
    """Small files in the format of sets that are large or not at hand."""
    if name == "emnist":
        write_emnist(root, "letters", 26, (20, 2), patch, first=1)
        return EMNIST("letters", root=root, **options)
    if name == "tiny imagenet":
        write_tiny_imagenet(root, (2, 1))
        return TinyImageNet(root=root, cache_dir=root / "cache", **options)
    if name == "cifar100":
        write_cifar(root, "CIFAR100", (5, 1), patch)
        return CIFAR100(root=root, **options)
    write_cifar(root, "CIFAR10", (30, 2), patch)
    return CIFAR10(root=root, storage="uint8" if name == "cifar10 as bytes" else "auto", **options)


def parts(batches: Any) -> list[torch.Tensor]:
    batches = batches.get("seen_schemes", batches) if isinstance(batches, dict) else batches
    assert isinstance(batches, (EvalBatches, SkewedBatches))
    return [torch.cat(part) for part in zip(*batches, strict=True)]


@pytest.mark.quick(4)
def test_shapes_types_and_ranges(module: tuple[str, FederatedDataModule]) -> None:
    name, data = module
    shape, num_train, num_test, num_classes, (lowest, highest) = FACTS[name]
    data.setup("fit")
    assert data.input_shape == shape
    assert data.num_classes == num_classes
    source = data.train_source()
    assert type(source) is (TensorSource if data.skew is None else SkewedSource)
    assert source.sizes.dtype == np.int64
    num_val = round(0.1 * num_train)
    assert int(source.sizes.sum()) == num_train - num_val
    inputs, labels = next(source.batches(0, torch.arange(int(source.sizes[0])), seed=0))
    assert (inputs.dtype, labels.dtype) == (torch.int64 if name == "shakespeare" else torch.float32, torch.int64)
    assert tuple(inputs.shape) == (min(data.batch_size, int(source.sizes[0])), *shape)
    assert len(parts(data.val_dataloader())[0]) == num_val
    test_inputs, test_labels = parts(data.test_dataloader())
    assert tuple(test_inputs.shape) == (num_test, *shape)
    assert test_inputs.min().item() == pytest.approx(lowest)
    assert test_inputs.max().item() == pytest.approx(highest)
    assert test_labels.unique().tolist() == list(range(num_classes))


@pytest.mark.slow
def test_held_out_and_client_samples_are_the_training_set(module: tuple[str, FederatedDataModule]) -> None:
    name, data = module
    counts = data.class_counts()
    assert counts is not None
    assert counts.shape == (12, FACTS[name][3])
    assert counts.sum(axis=1).tolist() == data.train_source().sizes.tolist()
    _, held_out = parts(data.val_dataloader())
    datasets = data.load_datasets()
    assert isinstance(datasets.train, TensorDataset)
    together = counts.sum(axis=0) + np.bincount(held_out.numpy(), minlength=counts.shape[1])
    labels = datasets.train.tensors[1].numpy()
    assert together.tolist() == np.bincount(labels >= 5 if name == "binary colors" else labels).tolist()
    assert len(set(data.split.index.tolist())) == len(data.split.index)


@pytest.mark.quick(7)
def test_both_sources_give_the_same_batches(module: tuple[str, FederatedDataModule]) -> None:
    _, data = module
    fast = data.train_source()
    slow: BatchSource = LoaderSource(data.load_datasets().train, data.split, data.loading)
    divided = data._client_data()
    if divided.skew is not None:
        slow = SkewedSource(slow, data.split, divided.training_rows(divided.skew))
    for client in (0, 7):
        order = torch.randperm(int(fast.sizes[client]), generator=torch.Generator().manual_seed(client))[:70]
        for one, other in zip(fast.batches(client, order, 0), slow.batches(client, order, 0), strict=True):
            assert [part.dtype for part in one] == [part.dtype for part in other]
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("cls", [MNIST, FashionMNIST, EMNIST, CIFAR10, CIFAR100, TinyImageNet])
def test_image_sets_say_how_they_are_normalised(cls: type[ImageDataModule]) -> None:
    data = cls(root="nowhere")
    assert len(data.pixel_mean) == len(data.pixel_std) in (1, 3)
    assert all(0.1 < value < 0.6 for value in (*data.pixel_mean, *data.pixel_std))


def test_setup_is_idempotent(module: tuple[str, FederatedDataModule]) -> None:
    _, data = module
    data.setup("fit")
    split, digest = data.split, data.split_hash
    for stage in ("fit", "validate", "test", "predict", None):
        data.setup(stage)
    assert data.split is split
    assert data.split_hash == digest
    assert len(digest) == 64


def test_summary_agrees_with_the_counts(module: tuple[str, FederatedDataModule]) -> None:
    _, data = module
    summary, counts = data.split_summary(), data.class_counts()
    assert counts is not None
    assert summary["clients"] == 12
    assert summary["samples"] == counts.sum()
    assert summary["classes_per_client_mean"] == pytest.approx((counts > 0).sum(axis=1).mean())
    assert summary["hash"] == data.split_hash


def test_pooled_training_data(module: tuple[str, FederatedDataModule]) -> None:
    _, data = module
    loader = data.train_dataloader()
    assert isinstance(loader, DataLoader)
    assert len(loader.dataset) == len(data.split.index)
    inputs, _ = next(iter(loader))
    assert tuple(inputs.shape[1:]) == data.input_shape


@pytest.mark.parametrize(
    ("cls", "train", "test"),
    [
        (
            MNIST,
            [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
            [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
        ),
        (FashionMNIST, [6000] * 10, [1000] * 10),
    ],
)
def test_the_real_files(data_root: Path, cls: type[MNIST], train: list[int], test: list[int]) -> None:
    """Class counts as published; the reader itself compares the labels' SHA-256 with that of the official files."""
    datasets = cls(root=data_root).load_datasets()
    for dataset, counts in ((datasets.train, train), (datasets.test, test)):
        assert isinstance(dataset, TensorDataset)
        inputs, labels = dataset.tensors
        assert np.bincount(labels.numpy()).tolist() == counts
    inputs = datasets.train.tensors[0]
    assert inputs.double().mean().item() == pytest.approx(0, abs=1e-3)
    assert inputs.double().std().item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(("cls", "other"), [(MNIST, "FashionMNIST"), (FashionMNIST, "MNIST")])
def test_mnist_and_fashion_mnist_are_told_apart(data_root: Path, tmp_path: Path, cls: type[MNIST], other: str) -> None:
    """Files of the same names, types and shapes, with ten labels each."""
    (tmp_path / cls.folder).parent.mkdir()
    (tmp_path / cls.folder).symlink_to(data_root / other / "raw")
    for train in (True, False):
        with pytest.raises(FederatedError) as caught:
            cls(root=tmp_path).read(train)
        name = "train" if train else "t10k"
        assert str(caught.value).startswith(f"The file {tmp_path / cls.folder}/{name}-labels-idx1-ubyte")
        assert f"is not the official one of {cls.title}: expected labels with the SHA-256 " in str(caught.value)


def test_mnist_pixels_equal_torchvision(data_root: Path, tmp_path: Path) -> None:
    """Reads the same files through torchvision, which wants them unpacked."""
    import gzip

    from torchvision.datasets import FashionMNIST as Reference

    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for packed in (data_root / "FashionMNIST" / "raw").glob("*.gz"):
        (raw / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    reference = Reference(tmp_path, train=False)
    test = FashionMNIST(root=tmp_path).load_datasets().test
    assert isinstance(test, TensorDataset)
    expected = (reference.data.float() / 255 - 0.2860) / 0.3530
    assert torch.allclose(test.tensors[0].squeeze(1), expected, atol=1e-6)
    assert torch.equal(test.tensors[1], reference.targets)


def test_root_comes_from_the_environment(data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_FED_DATA", str(data_root))
    assert MNIST().num_classes == 10


def test_download_leaves_present_files_alone(data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    monkeypatch.setattr(torchvision.datasets, "MNIST", lambda *a, **k: pytest.fail("nothing is missing"))
    MNIST(root=data_root, download=True).prepare_data()


def test_digits_have_their_defaults_and_one_test_set() -> None:
    data = Digits(split_seed=0)
    assert (data.num_clients, data.batch_size, data.val_fraction, data.test_fraction) == (20, 10, 0.1, 0.2)
    assert isinstance(data.partitioner, Shards)
    assert data.partitioner.classes_per_client == 2
    _, labels = parts(data.test_dataloader())
    assert np.bincount(labels).tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
    other = Digits(split_seed=1)
    assert torch.equal(parts(other.test_dataloader())[0], parts(data.test_dataloader())[0])
    assert other.split_hash != data.split_hash
    assert Digits(split_seed=0, test_fraction=0.0).test_dataloader() == []


def test_a_module_of_the_users_own_takes_one_method() -> None:
    data = Plain(num_clients=5, batch_size=7, split_seed=0)
    loaders = data.test_dataloader()
    assert isinstance(loaders, dict)
    assert {name: len(parts(loader)[0]) for name, loader in loaders.items()} == {"near": 9, "far": 11}
    assert list(data.predict_dataloader()) == ["near", "far"]
    assert data.val_dataloader() == []
    assert data.train_source().sizes.tolist() == [12] * 5


def test_a_data_set_of_the_users_own_with_dict_batches() -> None:
    data = FederatedDataModule(
        texts(targets=[i % 6 for i in range(60)]),
        partitioner=Shards(1),
        num_clients=6,
        batch_size=4,
        test_dataset=texts(5),
        predict_dataset=texts(3),
        val_fraction=0.2,
        split_seed=0,
    )
    source = data.train_source()
    assert type(source) is LoaderSource
    batch = next(source.batches(2, torch.arange(8), seed=0))
    assert set(batch) == {"tokens", "label"}
    assert tuple(batch["tokens"].shape) == (4, 7)
    assert data.input_shape == (7,)
    for loader, size in ((data.val_dataloader(), 12), (data.test_dataloader(), 5), (data.predict_dataloader(), 3)):
        assert isinstance(loader, DataLoader)
        assert sum(len(batch["label"]) for batch in loader) == size
    seen = {int(row) for batch in data.val_dataloader() for row in batch["tokens"][:, 0]}
    assert seen.isdisjoint(data.split.index.tolist())


@pytest.mark.parametrize(
    "targets", [list(range(6)) * 10, torch.arange(60) % 6, np.arange(60) % 6, tuple(range(6)) * 10]
)
@pytest.mark.parametrize("how", ["argument", "attribute"])
def test_targets_in_every_form(targets: Any, how: str) -> None:
    where: dict[str, Any] = {"targets": targets} if how == "argument" else {}
    dataset = texts() if how == "argument" else texts(targets=targets)
    data = FederatedDataModule(dataset, partitioner=Shards(2), num_clients=3, split_seed=0, **where)
    counts = data.class_counts()
    assert counts is not None
    assert counts.sum(axis=0).tolist() == [10] * 6


def test_targets_of_subsets_and_concatenations() -> None:
    base = texts(targets=[i % 6 for i in range(60)])
    rows = [3, 9, 15, 4]
    joined = ConcatDataset([Subset(base, rows), TensorDataset(X, Y)])
    data = FederatedDataModule(joined, num_clients=2, split_seed=0)
    counts = data.class_counts()
    assert counts is not None
    assert counts.sum(axis=0).tolist() == [10, 10, 10, 13, 11, 10]
    nested = FederatedDataModule(Subset(Subset(base, range(30)), rows), num_clients=1, split_seed=0)
    assert nested.class_counts().tolist() == [[0, 0, 0, 3, 1]]


@pytest.mark.parametrize(
    "dataset",
    [texts(), TensorDataset(X), TensorDataset(X, X), texts(targets=[{"box": 1}] * 60), texts(targets=[0.5] * 60)],
    ids=["none", "inputs only", "regression", "objects", "floats"],
)
def test_without_class_labels_an_iid_split_still_works(dataset: Dataset[Any]) -> None:
    data = FederatedDataModule(dataset, num_clients=4, split_seed=0)
    data.setup()
    assert data.class_counts() is None
    assert data.num_classes is None
    assert "classes_per_client_mean" not in data.split_summary()
    assert data.train_source().sizes.tolist() == [15] * 4


def test_samples_without_a_shape_have_none() -> None:
    assert FederatedDataModule(OneByOne(60, lambda index: "word"), num_clients=2).input_shape is None


def test_split_seed_defaults_to_the_runs_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = [FederatedDataModule(TensorDataset(X, Y), split_seed=seed).split_hash for seed in (0, 7)]
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    data = FederatedDataModule(TensorDataset(X, Y))
    assert data.split_hash == hashes[0]
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    data.setup("fit")
    assert data.split_hash == hashes[1]
    data.trainer = type("Seeded", (), {"seed": 0})()
    data.setup("fit")
    assert data.split_hash == hashes[0]


def test_the_held_out_share_does_not_depend_on_the_partitioner() -> None:
    made = [
        FederatedDataModule(TensorDataset(X, Y), partitioner=part, val_fraction=0.25, num_clients=3, split_seed=2)
        for part in (IID(), Shards(2))
    ]
    first, second = (parts(data.val_dataloader())[0] for data in made)
    assert torch.equal(first, second)
    assert len(first) == 15


@pytest.mark.parametrize("val_fraction", [0.0, 0.2])
def test_under_lightnings_own_trainer(val_fraction: float, tmp_path: Path) -> None:
    trainer, data = lightning_trainer(tmp_path), Plain(val_fraction=val_fraction)
    model = ImageClassifier(LogisticRegression(4, num_classes=6), num_classes=6)
    trainer.fit(model, datamodule=data)
    assert ("val/acc" in trainer.callback_metrics) == (val_fraction > 0)
    assert len(trainer.test(model, datamodule=data, verbose=False)) == 2


@pytest.mark.slow
def test_import_is_light() -> None:
    code = (
        "import sys, lightning.pytorch; before = set(sys.modules); import lightning_fed.data; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new & {'sklearn', 'scipy', 'torchvision', 'matplotlib', 'pandas'}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip().splitlines()[-1] == "[]"


def test_of_several_tensors_the_second_holds_the_targets() -> None:
    images, labels, names = torch.zeros(6, 2), torch.tensor([0, 1, 2] * 2), torch.arange(100, 106)
    assert FederatedDataModule(TensorDataset(images, labels, names), num_clients=2).num_classes == 3
    assert FederatedDataModule(TensorDataset(images, torch.zeros(6), names), num_clients=2).num_classes is None


def test_clients_train_on_other_samples_within_a_block() -> None:
    module = Digits(num_clients=4, client_test_fraction=0.25)
    before, held_out = module.split_hash, module.held_out_source("test").sizes
    with module.training_on(module.split.keep(module.split.owners > 0)):
        assert module.split_hash != before
        assert module.train_source().sizes.tolist() == [0, *(module.split.sizes[1:])]
        assert (module.held_out_source("test").sizes == held_out).all()
    with pytest.raises(ValueError, match="within"), module.training_on(module.split.keep(module.split.owners > 1)):
        raise ValueError("within")
    assert module.split_hash == before
