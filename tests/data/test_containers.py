"""Samples in what is no data set of torch: targets and users are found where they are plain to see."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset, random_split

from lightning_fed.data import ByUser, ClientDatasets, FederatedDataModule, Shards
from lightning_fed.errors import FederatedError
from tests.parts import OneByOne

N = 24
X = np.random.default_rng(0).normal(size=(N, 3))
Y = np.arange(N) % 4
HEAD = TensorDataset(torch.tensor(X[:8]).float(), torch.tensor(Y[:8]))
INSTEAD = "give a torch Dataset with `__len__` and `__getitem__`."
WHO = [f"writer {i % 3}" for i in range(N)]


class Table:
    """What Hugging Face's data sets have: columns by name, rows by number."""

    column_names = ["x", "label", "user"]

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: Any) -> Any:
        columns = {"x": X.tolist(), "label": Y.tolist(), "user": WHO}
        return columns[index] if isinstance(index, str) else {name: values[index] for name, values in columns.items()}


class Series:
    """A column as pandas has it: strings are objects."""

    iloc = None

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values, dtype=object if isinstance(values[0], str) else None)

    def __len__(self) -> int:
        return len(self.values)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.values


class Frame:
    """A data frame: its items are columns."""

    iloc = None

    def __init__(self, columns: dict[str, Series]) -> None:
        self.columns, self._held = list(columns), columns

    def __len__(self) -> int:
        return N

    def __getitem__(self, name: str) -> Series:
        return self._held[name]


def frame(**columns: Any) -> Any:
    return Frame({name: Series(values) for name, values in columns.items()})


def mapped(folder: Path) -> Any:
    for name, values in (("x", X.astype("f4")), ("y", Y)):
        np.save(folder / f"{name}.npy", values)
    return tuple(np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xy")


def set_up(dataset: Any, **options: Any) -> FederatedDataModule:
    data = FederatedDataModule(dataset, num_clients=4, partitioner=Shards(1), batch_size=2, split_seed=0, **options)
    data.setup()
    return data


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: (X, Y),
        lambda folder: (torch.tensor(X).float(), Y),
        mapped,
        lambda folder: {"x": X, "label": Y},
        lambda folder: frame(a=X[:, 0], target=Y),
        lambda folder: frame(a=X[:, 0], text=WHO, labels=Y),
        lambda folder: Table(),
        lambda folder: ConcatDataset([HEAD, Subset(Table(), range(8, N))]),
        lambda folder: random_split(ConcatDataset([Table()]), [1.0])[0],
        lambda folder: OneByOne(N, lambda i: X[i], targets=Series(Y)),
    ],
    ids=["tuple", "mixed", "mapped", "dict", "frame", "frame with words", "table", "concat", "nested", "series"],
)  # fmt: skip
def test_targets_are_found(tmp_path, make) -> None:
    data = set_up(make(tmp_path))
    assert data.num_classes == 4
    assert (data.class_counts() > 0).sum() == 4
    batch = next(data.train_source().batches(0, torch.arange(6), 0))
    if isinstance(batch, dict):
        assert set(batch) & {"label", "labels", "target"}
    elif isinstance(batch, list):
        assert batch[0].dtype == torch.float32


def test_numbers_stay_where_they_are_mapped(tmp_path) -> None:
    x, y = mapped(tmp_path)
    data = set_up((x, y))
    held = data._load().tensors
    assert held[0].data_ptr() == x.ctypes.data  # no copy
    assert held[1].dtype == torch.int64


@pytest.mark.parametrize("users", [WHO, Series(WHO), np.array(WHO, dtype=object), None])
def test_strings_as_users(users) -> None:
    dataset = Table() if users is None else TensorDataset(torch.tensor(X))
    data = FederatedDataModule(dataset, ByUser(), num_clients=None, users=users)
    data.setup()
    assert data.split.sizes.tolist() == [8, 8, 8]


def test_pandas_itself() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"x": X[:, 0], "label": Y, "user": WHO})
    assert set_up(table).num_classes == 4
    assert set_up(TensorDataset(torch.tensor(X)), targets=table["label"], users=table["user"].astype("category"))


def test_image_folders(tmp_path) -> None:
    from torchvision.datasets import FakeData, ImageFolder

    for label, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        for i in range(4):
            FakeData(8, (3, 4, 4))[i + 4 * label][0].save(tmp_path / name / f"{i}.png")
    data = FederatedDataModule(ImageFolder(str(tmp_path)), Shards(1), num_clients=2)
    data.setup()
    assert data.class_counts().tolist() in ([[4, 0], [0, 4]], [[0, 4], [4, 0]])


@pytest.mark.parametrize(
    ("container", "got"),
    [
        ((X, Y[:5]), "a tuple of 2 (ndarray): give arrays of one length, where row i of each is sample i."),
        ([X, Y], "a list of 2 (ndarray): give arrays in a tuple, where row i of each is sample i."),
        ({"train": Table(), "test": Table()}, "a dict of train, test: give its parts as options of their own."),
        ("own.npz", f"str: {INSTEAD}"),
        (Series(Y), f"Series: {INSTEAD}"),
        (
            DataLoader(Table()),
            "a DataLoader: give its data set here, or loaders to `fit(model, train_dataloaders=...)`.",
        ),
        (Table, "the class Table: give an instance of it."),
        (3, f"int: {INSTEAD}"),
        (torch.tensor(1.0), f"Tensor: {INSTEAD}"),
        ((row for row in X), f"generator: {INSTEAD}"),
        ([OneByOne, OneByOne], "a list of 2 (type): give one data set, such as a torch ConcatDataset."),
    ],
)
@pytest.mark.parametrize("option", ["train_dataset", "val_dataset", "test_dataset", "predict_dataset"])
def test_what_is_no_data_set_is_said(option: str, container, got) -> None:
    if option == "test_dataset" and isinstance(container, dict):
        return  # test sets by name
    sets = {"train_dataset": (X, Y), option: container}
    with pytest.raises(FederatedError) as caught:
        set_up(sets.pop("train_dataset"), **sets)
    assert str(caught.value) == (
        f"Expected `--data.{option}` to be a data set, a tuple of arrays or a data frame, got {got}"
    )


@pytest.mark.parametrize("option", ["val_dataset", "test_dataset", "predict_dataset"])
@pytest.mark.parametrize("part", [Table(), DataLoader(Table())])
def test_central_sets_are_no_lists_of_data_sets(option: str, part) -> None:
    with pytest.raises(FederatedError, match=f"--data.{option}. .* got a list of 2 .* give one data set, such as"):
        set_up((X, Y), **{option: [part, part]})


@pytest.mark.parametrize("clients", [[DataLoader(Table())], {"a": DataLoader(Table())}, ClientDatasets, DataLoader])
def test_clients_come_as_data_sets_not_as_loaders(clients) -> None:
    with pytest.raises(FederatedError, match="got (a DataLoader: give its data set here|the class)"):
        set_up(clients)
    with pytest.raises(FederatedError, match="data set of client 0 to be a data set, got (a DataLoader|the class)"):
        ClientDatasets(lambda _: DataLoader(Table()) if isinstance(clients, (list, dict)) else clients, 1)


def pairs(size: int) -> list[tuple[Any, int]]:
    return [(torch.tensor(X[row]), int(Y[row])) for row in range(size)]


@pytest.mark.parametrize(
    "clients", [[pairs(3), pairs(5)], {"a": pairs(3), "b": pairs(5)}, [pairs(3), Subset(HEAD, range(5))]]
)
def test_lists_of_samples_are_clients(clients: Any) -> None:
    data = FederatedDataModule(clients, num_clients=2, split_seed=0)
    assert data.split.sizes.tolist() == [3, 5]
    ((inputs, labels),) = data.train_source().batches(1, torch.arange(5), 0)
    assert (inputs.shape, labels.tolist()) == ((5, 3), Y[:5].tolist())
    with pytest.raises(FederatedError, match="num_clients` to be the number of data sets, 2, got 3"):
        FederatedDataModule(clients, num_clients=3).setup()
    with pytest.raises(FederatedError, match="got a (list of 2 .*: give one data set|dict of a, b)"):
        set_up((X, Y), val_dataset=clients)


def test_a_client_without_samples_is_said() -> None:
    with pytest.raises(FederatedError, match="data set of client 1 to hold samples"):
        FederatedDataModule([pairs(3), []], num_clients=2).setup()


@pytest.mark.parametrize(
    "sample", [(X[0], 1), [X[0], 1], [[1.0, 2.0], [3.0]], {"x": X[0]}], ids=["tuple", "list", "lists", "dict"]
)
def test_a_list_of_samples_is_one_data_set(sample: Any) -> None:
    data = FederatedDataModule([sample] * 4, num_clients=2)
    assert data.split.sizes.tolist() == [2, 2]


def test_a_stream_evaluates_but_cannot_be_split() -> None:
    class Stream(IterableDataset):
        targets = Y

        def __iter__(self):
            return iter(zip(X, Y, strict=True))

    assert len(list(set_up((X, Y), val_dataset=Stream()).val_dataloader())) == 1
    with pytest.raises(FederatedError, match=f"got Stream, a stream: {INSTEAD}"):
        set_up(Stream())


def test_other_sets_may_be_arrays_too() -> None:
    data = set_up((X, Y), val_dataset=(X, Y), test_dataset={"near": (X, Y), "far": Table()})
    assert data.val_dataloader().num_samples == N
    assert list(data.test_dataloader()) == ["near", "far"]
