"""Class labels that training does not have, and samples without a user, end in one sentence."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from lightning_fed.data import Arrays, BundledDataModule, Datasets, FederatedDataModule
from lightning_fed.data.partitioners import ByUser, DirichletByClass, DirichletByClient, ExactClasses, Shards
from lightning_fed.data.skews import BinaryColors, ClassColors, ClientColors, ClientRotation, FeatureSkew
from lightning_fed.errors import FederatedError
from tests.parts import OneByOne

X = torch.rand(30, 1, 5, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(30) % 3
BEYOND = TensorDataset(X, Y + 1)


class Bundle(BundledDataModule):
    """A data module of the user's own."""

    def __init__(self, **facts: Any) -> None:
        super().__init__(num_clients=3)
        self.facts = facts

    def load_datasets(self) -> Datasets:
        return Datasets(TensorDataset(X, Y), **self.facts)


LISTED = OneByOne(30, lambda index: (X[index], int(Y[index]) + 1), labels=(Y + 1).tolist())


def sentence(data: FederatedDataModule) -> str:
    with pytest.raises(FederatedError) as error:
        data.setup()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "skew", [None, ClientColors(), ClientRotation(), BinaryColors(), ClassColors()], ids=lambda s: type(s).__name__
)
@pytest.mark.parametrize(
    ("sets", "option"),
    [
        ({"test_dataset": BEYOND}, "`--data.test_dataset`"),
        ({"val_dataset": BEYOND}, "`--data.val_dataset`"),
        ({"test_dataset": Subset(BEYOND, [0, 2])}, "`--data.test_dataset`"),
        ({"test_dataset": LISTED}, "`--data.test_dataset`"),
        ({"test_dataset": {"near": TensorDataset(X, Y), "far": BEYOND}}, "`--data.test_dataset` far"),
    ],
    ids=["test", "val", "subset", "one by one", "several"],
)
def test_labels_that_training_does_not_have(skew: FeatureSkew | None, sets: dict[str, Any], option: str) -> None:
    assert sentence(FederatedDataModule(TensorDataset(X, Y), num_clients=2, skew=skew, **sets)) == (
        f"Expected {option} to hold class labels from 0 to 2, as the training data do, got 3: leave such samples out, "
        "or in a data module of your own give `Datasets` all `class_names`, or set `--data.class_labels false` if "
        "targets are not class labels."
    )


def test_names_of_the_classes_say_how_many_there_are() -> None:
    assert "labels from 0 to 2, as the training data do, got 3:" in sentence(Bundle(test=BEYOND))
    assert "labels from 0 to 2, as the training data do, got 3:" in sentence(Bundle(test=BEYOND, class_names="abc"))
    named = Bundle(test=BEYOND, class_names="abcd")
    named.setup()
    assert named.num_classes == 4


def test_targets_that_are_no_class_labels_are_not_compared() -> None:
    counts = Bundle(test=BEYOND, class_labels=False)
    counts.setup()
    assert counts.num_classes is None
    assert counts.class_counts() is None


@pytest.mark.parametrize(
    "test",
    [
        Subset(TensorDataset(X, Y), [0, 1]),
        TensorDataset(X, Y - 100),
        TensorDataset(X, (Y + 1).to(torch.float32)),
        TensorDataset(X),
        TensorDataset(X[:0], Y[:0]),
        {"a": TensorDataset(X, Y), "b": Subset(TensorDataset(X, Y), [2])},
    ],
    ids=["fewer", "ignored", "floats", "none", "empty", "several"],
)
def test_other_test_sets_are_accepted(test: Any) -> None:
    data = FederatedDataModule(TensorDataset(X, Y), num_clients=2, test_dataset=test)
    data.setup()
    assert data.num_classes == 3


def test_targets_to_split_by_may_be_coarser_than_the_labels() -> None:
    options: dict[str, Any] = {"num_clients": 2, "targets": Y // 2, "split_seed": 0}
    FederatedDataModule(TensorDataset(X, Y), test_dataset=TensorDataset(X, Y), **options).setup()
    assert "from 0 to 2" in sentence(FederatedDataModule(TensorDataset(X, Y), test_dataset=BEYOND, **options))


PRICES = torch.arange(300) * 9_700 + 100  # up to 2,900,400


def prices(numbers: Any, **options: Any) -> FederatedDataModule:
    data = FederatedDataModule(TensorDataset(torch.zeros(300, 2), numbers), num_clients=3, **options)
    data.setup()
    return data


def test_prices_are_no_class_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("lightning_fed.data.loading.rank_zero_info", said.append)
    data = prices(PRICES, val_dataset=TensorDataset(torch.zeros(300, 2), PRICES + 7))
    assert (data.num_classes, data.labels, data.class_counts()) == (None, None, None)
    assert not [name for name in data.split_summary() if "label" in name or "class" in name]
    prices(PRICES)
    assert said == [
        "The targets, whole numbers up to 2,900,400, count as no class labels: there would be more classes than "
        "samples. Set `--data.class_labels` to say what they are."
    ]
    said.clear()
    assert prices(PRICES, class_labels=False).num_classes is None
    assert prices(PRICES, class_labels=True).num_classes == 2_900_401
    assert not said


@pytest.mark.parametrize(
    ("targets", "classes"),
    [
        (torch.arange(300) % 10_000 + 9_700, 10_000),
        (torch.arange(300) + 9_701, None),
        (torch.where(torch.arange(300) == 5, 10**9, 3), None),
        (torch.where(torch.arange(300) % 7 == 0, -100, torch.arange(300) % 5), None),
        (torch.arange(300) % 2 == 0, None),
        (torch.zeros(300, 4, 4, dtype=torch.uint8), None),
        (PRICES[:, None], None),
        (torch.arange(900).reshape(300, 3), None),
        (torch.arange(300).to(torch.uint8) % 7, 7),
    ],
    ids=["10,000", "10,001", "outlier", "ignored", "bool", "masks", "column", "several", "bytes"],
)
def test_whole_numbers_that_are_labels_and_that_are_none(targets: Any, classes: int | None) -> None:
    data = prices(targets)
    assert data.num_classes == classes
    assert ("label_entropy_mean" in data.split_summary()) == (classes is not None)


def test_as_many_classes_as_samples_may_be_labels() -> None:
    data = FederatedDataModule(TensorDataset(torch.zeros(20_000, 1), torch.arange(20_000)), num_clients=2)
    assert data.num_classes == 20_000


@pytest.mark.parametrize("partitioner", [Shards(1), ExactClasses(1), DirichletByClient(1.0), DirichletByClass(1.0)])
def test_partitioners_by_label_refuse_targets_that_are_none(partitioner: Any) -> None:
    for targets, options in ((PRICES, {}), (PRICES % 7, {"class_labels": False})):
        with pytest.raises(FederatedError, match=f"the partitioner {type(partitioner).__name__}, got targets that are"):
            prices(targets, partitioner=partitioner, **options)
    assert prices(PRICES // 10**6, partitioner=partitioner, class_labels=True).num_classes == 3


def test_groups_to_split_by_leave_prices_alone() -> None:
    data = prices(
        PRICES, targets=PRICES % 3, partitioner=Shards(1), val_dataset=TensorDataset(torch.zeros(300, 2), PRICES + 7)
    )
    assert data.num_classes == 3


def test_the_entropy_of_two_hundred_million_classes_takes_no_table() -> None:
    data = prices(PRICES * 70, class_labels=True)
    tracemalloc.start()
    assert data.split_summary()["label_entropy_pooled"] == pytest.approx(np.log2(300))
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_arrays_of_other_targets_may_go_beyond_those_of_training(tmp_path: Path) -> None:
    counts = np.arange(30)
    np.savez(tmp_path / "own.npz", x_train=X, y_train=counts, x_test=X, y_test=counts + 5)
    data = Arrays(tmp_path / "own.npz", class_labels=False, num_clients=3)
    data.setup()
    assert data.num_classes is None
    assert "class labels from 0 to 29, as the training data do, got 34" in sentence(
        Arrays(tmp_path / "own.npz", num_clients=3)
    )


class Owned(TensorDataset):
    """A data set that knows its users."""

    def __init__(self, users: Any) -> None:
        super().__init__(X, Y)
        self.users = users


@pytest.mark.parametrize("how", ["option", "attribute"])
def test_a_sample_without_a_user_is_refused(how: str) -> None:
    users = [1.0, 2.0, float("nan")] * 10

    def data(users: Any) -> FederatedDataModule:
        train = TensorDataset(X, Y) if how == "option" else Owned(users)
        options = {"users": users} if how == "option" else {}
        return FederatedDataModule(train, partitioner=ByUser(), num_clients=None, **options)

    for given in (users, np.array(users), torch.tensor(users)):
        assert sentence(data(given)) == (
            "Expected `--data.users` to name the user of each training sample, got NaN for 10 of 30: leave these "
            "samples out, or give them users."
        )
    assert data([1.0, 2.0, 3.0] * 10).division.split.num_clients == 3
    mixed = sentence(data(["a", "b", float("nan")] * 10))
    assert "`--data.users`" in mixed
    assert data(["a", "b", "nan"] * 10).division.split.num_clients == 3
