"""What the hash of a split tells apart, and what it does not depend on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from lightning_fed.data import CIFAR10, Arrays, BundledDataModule, CropFlip, Datasets, FederatedDataModule
from lightning_fed.data.partitioners import IID, ByUser
from lightning_fed.data.skews import BinaryColors, ClassColors, ClientColors, ClientRotation, FeatureSkew
from lightning_fed.errors import FederatedError
from lightning_fed.models import ImageClassifier, LogisticRegression
from tests.official_files import write_cifar
from tests.parts import OneByOne, federated_trainer

N = 120
X = torch.rand(N, 1, 6, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 6
USERS = np.arange(N) // 12


def module(train: Dataset[Any] | None = None, **options: Any) -> FederatedDataModule:
    """Clients whose rows depend neither on targets nor on the seed."""
    options = {"num_clients": None, "partitioner": ByUser(), "users": USERS, "split_seed": 0, **options}
    return FederatedDataModule(TensorDataset(X, Y) if train is None else train, **options)


class First(BundledDataModule):
    """A data module that brings its data."""

    def load_datasets(self) -> Datasets:
        return Datasets(TensorDataset(X, Y), users=USERS)


class Second(First):
    """Another data set with the same numbers of classes and samples."""


def pairs(targets: Any) -> OneByOne:
    """The same samples, read one by one."""
    return OneByOne(N, lambda row: (X[row], targets[row]), targets=targets)


OTHER: dict[str, FederatedDataModule] = {
    "as it is": module(),
    "a label": module(TensorDataset(X, torch.tensor([*Y[:-1].tolist(), 0]))),
    "other targets": module(targets=Y // 2),
    "a client": module(users=USERS // 2),
    "rows": module(users=USERS[::-1].copy()),
    "held out": module(client_test_fraction=0.2),
    "regression": module(targets=np.linspace(0, 1, N)),
    "strings": module(pairs(list("abcdef") * 20)),
    "other strings": module(pairs(list("abcdeg") * 20)),
    "no targets": module(TensorDataset(X)),
    "data set": module(pairs(Y)),
    "data module": First(partitioner=ByUser(), num_clients=None, split_seed=0),
    "another data module": Second(partitioner=ByUser(), num_clients=None, split_seed=0),
    "colors": module(skew=ClientColors()),
    "rotation": module(skew=ClientRotation()),
    "a larger rotation": module(skew=ClientRotation(90.0)),
    "another seed of the skew": module(skew=ClientRotation(), split_seed=1),
    "flips": module(skew=BinaryColors()),
    "noisy labels, not part of the schemes": module(skew=BinaryColors(label_noise=0.1)),
    "class colors": module(skew=ClassColors()),
    "more class colors": module(skew=ClassColors(test_colors=11)),
}


def test_every_difference_of_the_clients_is_told() -> None:
    hashes = {name: data.split_hash for name, data in OTHER.items()}
    assert len(set(hashes.values())) == len(hashes)
    assert all(len(digest) == 64 for digest in hashes.values())
    assert {data.division.hash() for name, data in OTHER.items() if "skew" in name} == {module().division.hash()}


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 3, "eval_batch_size": 5},
        {"in_memory": False, "num_workers": 2},
        {"augmentation": CropFlip()},
        {"test_dataset": TensorDataset(X[:5], Y[:5])},
        {"targets": Y.to(torch.int16)},
        {"targets": Y.tolist()},
        {"users": [f"user {user}" for user in USERS]},
    ],
    ids=lambda options: " ".join(options),
)
@pytest.mark.parametrize("skew", [None, ClientRotation()], ids=["no skew", "skew"])
def test_the_hash_does_not_depend_on_how_data_are_read(skew: FeatureSkew | None, options: dict[str, Any]) -> None:
    assert module(skew=skew, **options).split_hash == module(skew=skew).split_hash


def test_without_a_skew_a_seed_that_changes_no_row_changes_no_hash() -> None:
    assert module(split_seed=9).split_hash == module().split_hash


def test_the_hash_does_not_depend_on_where_data_lie_and_how_they_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / "a", tmp_path / "b" / "c"]
    for folder in folders:
        folder.mkdir(parents=True)
        np.savez(folder / f"{folder.name}.npz", x_train=X.numpy(), y_train=Y.numpy())
        write_cifar(folder, "CIFAR10", (4, 1), monkeypatch)
    arrays = {Arrays(folder / f"{folder.name}.npz", num_clients=5, split_seed=0).split_hash for folder in folders}
    assert len(arrays) == 1
    images = {
        CIFAR10(root=folder, num_clients=5, split_seed=0, storage=storage).split_hash
        for folder, storage in zip(folders, ("float32", "uint8"), strict=True)
    }
    assert len(images) == 1
    assert arrays != images


def test_the_hash_is_computed_once_for_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for with every checkpoint."""
    data = module(partitioner=IID(), num_clients=4, split_seed=None, users=None)
    asked: list[int] = []
    monkeypatch.setattr(data, "identity", lambda: [str(asked.append(1))])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    first = data.split_hash
    assert data.split_hash == data.split_summary()["hash"] == first
    assert len(asked) == 1
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    assert data.split_hash != first
    assert len(asked) == 2


def test_a_run_goes_on_with_its_own_clients_alone(tmp_path: Path) -> None:
    """The rows of the clients are the same, what they look like is not."""
    options: dict[str, Any] = {"clients_per_round": 2, "local_steps": 1, "enable_checkpointing": True}
    trainer = federated_trainer(tmp_path, max_rounds=1, **options)
    trainer.fit(ImageClassifier(LogisticRegression(36)), module(skew=ClientRotation(30.0)))
    [last] = tmp_path.rglob("last.ckpt")
    for angle in (30.0, 40.0):
        trainer = federated_trainer(tmp_path, max_rounds=2, **options)
        model, data = ImageClassifier(LogisticRegression(36)), module(skew=ClientRotation(angle))
        if angle == 30.0:
            trainer.fit(model, data, ckpt_path=last)
            assert trainer.round == 2
            continue
        with pytest.raises(FederatedError, match="Expected the same data split as in the run of .* got another"):
            trainer.fit(model, data, ckpt_path=last)
