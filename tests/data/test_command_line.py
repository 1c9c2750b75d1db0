"""The options of the data modules, as a command line and a YAML file give them."""

from pathlib import Path
from typing import Any

import jsonargparse
import numpy as np
import pytest

from lightning_fed.data import CIFAR10, CIFAR100, EMNIST, Arrays, Digits, FederatedDataModule, TinyImageNet
from lightning_fed.data.datasets.mnist import MNIST, FashionMNIST
from lightning_fed.data.partitioners import IID, Shards
from lightning_fed.errors import FederatedError

OWN = """
import torch
from torch.utils.data import Dataset


class Squares(Dataset):
    def __init__(self, size: int, offset: float = 0.0):
        self.size, self.offset = size, offset
        self.targets = [i % 4 for i in range(size)]

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"x": torch.tensor([index**2 + self.offset]), "y": self.targets[index]}
"""

CONFIG = """
data:
  class_path: FederatedDataModule
  init_args:
    train_dataset: {class_path: own_squares.Squares, init_args: {size: 40}}
    test_dataset:
      near: {class_path: own_squares.Squares, init_args: {size: 5}}
      far: {class_path: own_squares.Squares, init_args: {size: 7, offset: 0.5}}
    partitioner: {class_path: Shards, init_args: {classes_per_client: 1}}
    num_clients: 4
"""


@pytest.fixture
def parser() -> jsonargparse.ArgumentParser:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_subclass_arguments(FederatedDataModule, "data")
    return parser


def build(parser: jsonargparse.ArgumentParser, *args: str) -> Any:
    return parser.instantiate_classes(parser.parse_args(list(args))).data


@pytest.mark.parametrize("cls", [MNIST, FashionMNIST, EMNIST, CIFAR10, CIFAR100, TinyImageNet, Digits, Arrays])
def test_short_names_and_shared_options(parser: jsonargparse.ArgumentParser, cls: type[FederatedDataModule]) -> None:
    options = ["--data.num_clients", "5", "--data.partitioner", "Shards", "--data.partitioner.classes_per_client", "3"]
    data = build(parser, "--data", cls.__name__, *options, "--data.eval_batch_size", "64")
    assert type(data) is cls
    assert (data.num_clients, data.eval_batch_size) == (5, 64)
    assert isinstance(data.partitioner, Shards)
    assert data.partitioner.classes_per_client == 3


def test_each_module_has_its_defaults(parser: jsonargparse.ArgumentParser) -> None:
    digits = build(parser, "--data", "Digits")
    assert (digits.num_clients, digits.batch_size, digits.val_fraction) == (20, 10, 0.1)
    assert isinstance(digits.partitioner, Shards)
    mnist = build(parser, "--data", "MNIST")
    assert (mnist.num_clients, mnist.batch_size, mnist.val_fraction) == (10, 32, 0.0)
    assert isinstance(mnist.partitioner, IID)
    assert mnist.root is None
    assert mnist.download is False


def test_options_of_image_sets(parser: jsonargparse.ArgumentParser) -> None:
    words = ["--data.variant", "letters", "--data.storage", "uint8", "--data.root", "/data", "--data.download", "true"]
    data = build(parser, "--data", "EMNIST", *words)
    assert (data.variant, data.storage, data.root, data.download) == ("letters", "uint8", "/data", True)
    assert build(parser, "--data", "TinyImageNet", "--data.cache_dir", "/cache").cache_dir == "/cache"
    with pytest.raises(Exception, match="all"):
        parser.parse_args(["--data", "EMNIST", "--data.variant", "all"])


def test_options_of_arrays(parser: jsonargparse.ArgumentParser, tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", images=np.full((4, 6, 5, 3), 51, dtype=np.uint8), y_train=[0, 1, 0, 1])
    words = ["--data", "Arrays", "--data.path", "own.npz", "--data.root", str(tmp_path), "--data.x_train", "images"]
    words += ["--data.layout", "NHWC", "--data.mean", "[0.1, 0.2, 0.3]"]
    for more, expected in (([], [0.1, 0.0, -0.1]), (["--data.scale=false", "--data.std=0.5"], [101.8, 101.6, 101.4])):
        inputs = build(parser, *words, *more).load_datasets().train.tensors[0]
        assert inputs.mean(dim=(0, 2, 3)).tolist() == pytest.approx(expected, abs=1e-4)


def test_the_default_partitioner_takes_options_and_is_saved(parser: jsonargparse.ArgumentParser) -> None:
    config = parser.parse_args(["--data", "Digits", "--data.partitioner.classes_per_client", "1"])
    saved = config.as_dict()["data"]["init_args"]["partitioner"]
    options = {"classes_per_client": 1, "min_samples": 0, "too_small": "redraw"}
    assert saved == {"class_path": "lightning_fed.data.Shards", "init_args": options}


@pytest.mark.parametrize("option", ["train_dataset", "val_dataset", "test_dataset", "predict_dataset", "targets"])
def test_modules_that_bring_their_data_take_no_other(parser: jsonargparse.ArgumentParser, option: str) -> None:
    with pytest.raises(Exception, match=f"Option '{option}' is not accepted"):
        parser.parse_args(["--data", "Digits", f"--data.{option}", "[1]"])


def test_a_data_set_of_the_users_own_by_class_path(
    parser: jsonargparse.ArgumentParser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_squares.py").write_text(OWN)
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.syspath_prepend(tmp_path)
    data = build(parser, "--config", str(tmp_path / "config.yaml"), "--data.train_dataset.size", "80")
    counts = data.class_counts()
    assert sorted(counts.max(axis=1).tolist()) == [20, 20, 20, 20]
    assert counts.sum() == 80
    assert {name: len(loader.dataset) for name, loader in data.test_dataloader().items()} == {"near": 5, "far": 7}


def test_what_is_held_out_is_a_number_or_a_share(parser: jsonargparse.ArgumentParser) -> None:
    for word, value in (("3", 3), ("0.25", 0.25)):
        data = build(parser, "--data=Digits", f"--data.unseen_clients={word}", "--data.num_clients=12")
        assert data.split.num_clients == 9
        assert type(data.held_out.unseen_clients) is type(value)


def test_the_number_of_clients_may_be_left_to_the_users(parser: jsonargparse.ArgumentParser) -> None:
    words = ["--data", "Digits", "--data.partitioner", "ByUser", "--data.num_clients", "null"]
    with pytest.raises(FederatedError, match=r"Expected users for the partitioner ByUser"):
        build(parser, *words).setup()


def test_every_partitioner_is_found_by_its_name(parser: jsonargparse.ArgumentParser) -> None:
    for name, option, value in (
        ("ExactClasses", "classes_per_client", 3), ("DirichletByClient", "alpha", 0.2), ("PowerLaw", "exponent", 0.5),
        ("DirichletByClass", "alpha", 2.0), ("DirichletBalanced", "min_samples", 4), ("QuantityDirichlet", "beta", 3.0),
        ("IID", "min_samples", 7),
    ):  # fmt: skip
        words = ["--data", "Digits", "--data.partitioner", name, f"--data.partitioner.{option}", str(value)]
        data = build(parser, *words)
        assert type(data.partitioner).__name__ == name
        assert getattr(data.partitioner, option) == value
        assert data.split.num_clients == 20
