"""What is held out of training: validation, unseen clients, each client's own test samples."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lightning_fed.data import MNIST, BundledDataModule, Datasets, Digits, Division, FederatedDataModule, Split
from lightning_fed.data.batch_sources import EvalBatches
from lightning_fed.data.holdout import CENTRAL, DivisionOptions, divide
from lightning_fed.data.partitioners import IID, ByUser, Partitioner, QuantityDirichlet, Shards
from lightning_fed.data.skews import ClientRotation
from lightning_fed.errors import FederatedError
from tests.parts import OneByOne

N = 240
X = torch.arange(N, dtype=torch.float32).unsqueeze(1)
Y = torch.arange(N) % 6
USERS = np.random.default_rng(0).permutation(np.repeat([f"user {i}" for i in range(15)], 16))


def module(**options: Any) -> FederatedDataModule:
    options = {"num_clients": 8, "split_seed": 3, "test_dataset": TensorDataset(X[:5], Y[:5]), **options}
    return FederatedDataModule(TensorDataset(X, Y), **options)


def rows_of(loader: Any) -> list[int]:
    """The rows in the batches of an evaluation set: sample i has the input i."""
    assert isinstance(loader, EvalBatches)
    return torch.cat([inputs for inputs, _ in loader]).flatten().long().tolist()


def parts(division: Division) -> list[np.ndarray]:
    return [division.split.index, division.val.rows, division.clients.rows, division.unseen.rows]


# The splits of experiments that were run before there were other parts than a central validation set.


def test_the_quickstarts_split_stays_as_it_is() -> None:
    data = Digits(num_clients=20, batch_size=10, partitioner=Shards(classes_per_client=2), split_seed=0)
    assert data.division.hash() == "77554728fab62d7f8eb46e6ca9215e080047dcc34d928451f1bd98ceafd16064"


@pytest.mark.parametrize(
    ("partitioner", "digest"),
    [
        (Shards(classes_per_client=2), "dbb51b54fe5a070c307c8a47e7a7fffbd68fd124150153fa3cbc09925ed0ba4e"),
        (IID(), "26777ae4ea1be30faf53617b9b423bafdf766e18652618704fe2244d63117c1c"),
    ],
)
def test_the_splits_of_mnist_stay_as_they_are(data_root: Path, partitioner: Partitioner, digest: str) -> None:
    data = MNIST(root=data_root, num_clients=100, partitioner=partitioner, split_seed=0)
    assert data.division.hash() == digest


def test_without_new_parts_the_hash_of_a_division_is_that_of_the_split() -> None:
    data = module(val_fraction=0.25)
    assert data.division.hash() == Split.hash(data.split)
    assert module(val_fraction=0.25, val_split="per_client").split_hash != data.split_hash


# Every combination of parts


@given(
    num_clients=st.integers(2, 12),
    partitioner=st.sampled_from([IID(), Shards(1), QuantityDirichlet(5.0, min_samples=7), ByUser()]),
    val_fraction=st.sampled_from([0.0, 0.15, 0.45]),
    val_split=st.sampled_from(["central", "per_client"]),
    unseen=st.sampled_from([0, 1, 0.3]),
    test_fraction=st.sampled_from([0.0, 0.2, 0.5]),
    seed=st.integers(0, 2**63 - 1),
)
@settings(max_examples=80, deadline=None)
def test_every_row_is_in_exactly_one_part(
    num_clients: int, partitioner: Partitioner, val_fraction: float, val_split: Any, unseen: float,
    test_fraction: float, seed: int,
) -> None:  # fmt: skip
    options = DivisionOptions(val_fraction, val_split, unseen, test_fraction)
    clients = None if partitioner.reads == "users" else num_clients
    arguments = (options, partitioner, Y.numpy(), USERS, N, clients, seed)
    division = divide(*arguments)
    assert sorted(np.concatenate(parts(division)).tolist()) == list(range(N))
    total = 15 if clients is None else num_clients
    num_unseen = {0: 0, 1: 1, 0.3: max(1, round(0.3 * total))}[unseen]
    assert (division.split.num_clients, division.num_owners) == (total - num_unseen, total)
    assert (np.diff(division.numbers) > 0).all()
    owners = division.owners(N)
    assert np.array_equal(owners[division.split.index], division.split.owners)
    is_central = val_split == "central" and val_fraction > 0
    assert (owners == CENTRAL).sum() == (len(division.val) if is_central else 0)
    assert set(division.unseen.owners.tolist()) <= set(range(total - num_unseen, total))
    # The same again, and from nothing but the arguments.
    again = divide(*arguments)
    assert all(np.array_equal(a, b) for a, b in zip(parts(division), parts(again), strict=True))
    assert division.hash() == again.hash()


def test_shares_of_each_client_are_rounded_down() -> None:
    sizes = module(partitioner=QuantityDirichlet(2.0)).split.sizes
    data = module(
        partitioner=QuantityDirichlet(2.0), val_fraction=0.29, val_split="per_client", client_test_fraction=0.2
    )
    division = data.division
    num_val, num_test = (np.bincount(part.owners, minlength=8) for part in (division.val, division.clients))
    assert num_val.tolist() == [int(29 * size) // 100 for size in sizes]
    assert num_test.tolist() == [size // 5 for size in sizes]
    assert np.array_equal(data.train_source().sizes, sizes - num_val - num_test)
    # Not always the first samples of a client.
    whole = module(partitioner=QuantityDirichlet(2.0)).split
    first = [whole.index[start] for start, size in zip(whole.offsets, sizes, strict=False) if size > 10]
    assert 0 < np.isin(first, division.clients.rows).sum() + np.isin(first, division.val.rows).sum() < len(first)


def test_an_unseen_client_is_a_client_of_the_split_left_out() -> None:
    whole, data = module(partitioner=Shards(2)), module(partitioner=Shards(2), unseen_clients=3)
    division = data.division
    assert len(division.numbers) == data.split.num_clients == len(data.train_source().sizes) == 5
    owned = np.split(whole.split.index, whole.split.offsets[1:-1])
    for client, number in enumerate(division.numbers):
        start, end = data.split.offsets[client : client + 2]
        assert np.array_equal(data.split.index[start:end], owned[number])
    left_out = [owned[number] for number in sorted(set(range(8)) - set(division.numbers.tolist()))]
    assert np.array_equal(division.unseen.rows, np.concatenate(left_out))
    assert np.array_equal(division.unseen.owners, np.repeat([5, 6, 7], [len(rows) for rows in left_out]))
    chosen = {tuple(module(unseen_clients=0.25, split_seed=seed).division.numbers) for seed in range(5)}
    assert len(chosen) > 1
    assert all(len(numbers) == 6 for numbers in chosen)


@pytest.mark.parametrize("val_fraction", [0.0, 0.2])
def test_users_that_are_held_out_are_so_entirely(val_fraction: float) -> None:
    data = module(
        partitioner=ByUser(), num_clients=None, users=USERS, unseen_clients=4, val_fraction=val_fraction,
        client_test_fraction=0.25,
    )  # fmt: skip
    division, names = data.division, np.unique(USERS)
    unseen = set(USERS[division.unseen.rows])
    assert len(unseen) == 4
    for part in (division.split.index, division.val.rows, division.clients.rows):
        assert not unseen & set(USERS[part])
    assert set(names[division.numbers]) == set(names) - unseen
    for client, number in enumerate(division.numbers):
        start, end = division.split.offsets[client : client + 2]
        assert set(USERS[division.split.index[start:end]]) <= {names[number]}
    assert len(division.val) == round(val_fraction * 11 * 16)


def test_hash_covers_every_part() -> None:
    different: list[dict[str, Any]] = [
        {}, {"val_fraction": 0.2}, {"val_fraction": 0.2, "val_split": "per_client"}, {"unseen_clients": 2},
        {"client_test_fraction": 0.2}, {"client_test_fraction": 0.2, "val_fraction": 0.2, "val_split": "per_client"},
        {"unseen_clients": 2, "client_test_fraction": 0.2},
    ]  # fmt: skip
    assert len({module(**options).split_hash for options in different}) == len(different)
    # Equal training sets, but for a row that is validated on instead of tested on.
    division = module(client_test_fraction=0.2, val_fraction=0.2, val_split="per_client").division
    clients = division.clients
    moved = type(clients)(clients.rows[1:], clients.owners[1:])
    assert Division(3, division.split, division.numbers, 8, division.val, moved).hash() != division.hash()


# What evaluation gets


def test_held_out_sets_are_test_sets_of_their_own_name() -> None:
    data = module(unseen_clients=2, client_test_fraction=0.25, val_fraction=0.25, val_split="per_client")
    division, loaders = data.division, data.test_dataloader()
    assert isinstance(loaders, dict)
    assert {name: rows_of(loader) for name, loader in loaders.items()} == {
        "test": [0, 1, 2, 3, 4],
        "clients": division.clients.rows.tolist(),
        "unseen": division.unseen.rows.tolist(),
    }
    assert rows_of(data.val_dataloader()) == division.val.rows.tolist()
    assert list(data.predict_dataloader()) == ["test", "clients", "unseen"]
    alone = module(unseen_clients=2, test_dataset=None).test_dataloader()
    assert list(alone) == ["unseen"]
    named = module(client_test_fraction=0.25, test_dataset={"near": TensorDataset(X, Y), "far": TensorDataset(X, Y)})
    assert list(named.test_dataloader()) == ["near", "far", "clients"]
    assert len(data.train_dataloader().dataset) == len(division.split.index)


def test_under_a_skew_held_out_samples_look_as_those_of_their_client() -> None:
    """A rotation of its own for each client, those that do not train included."""
    images = torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(0)).repeat_interleave(2, dim=0)
    options: dict[str, Any] = {"num_clients": 6, "split_seed": 0, "eval_batch_size": 7}
    data = FederatedDataModule(
        TensorDataset(images, torch.arange(120) % 6), skew=ClientRotation(), unseen_clients=2,
        client_test_fraction=0.3, val_fraction=0.2, val_split="per_client", **options,
    )  # fmt: skip
    source, division = data.train_source(), data.division
    loaders: dict[str, Any] = {**data.test_dataloader(), "val": data.val_dataloader()}
    parts = [(division.split.index, division.split.owners), (division.val.rows, division.val.owners)]
    seen = [batch[0] for client in range(4) for batch in source.batches(client, torch.arange(source.sizes[client]), 0)]
    seen += [batch[0] for batch in loaders["val"]]
    for name, part in division.tests().items():
        parts.append((part.rows, part.owners))
        seen += [batch[0] for batch in loaders[name]]
    rows, owners = (np.concatenate(column) for column in zip(*parts, strict=True))
    places, shown = np.argsort(rows), torch.cat(seen)
    alike = [torch.allclose(shown[a], shown[b], atol=1e-5) for a, b in places.reshape(-1, 2).tolist()]
    assert alike == [owners[a] == owners[b] for a, b in places.reshape(-1, 2)]
    assert 5 <= sum(alike) <= 55


# Users, wherever they are


NOTES = OneByOne(12, int, users=[f"writer {i % 3}" for i in range(12)])
TENSORS = {"x": X[:12], "user": torch.arange(12) % 3}  # the rows of its tensors, the user among them
NAMED = OneByOne(12, lambda row: {"x": X[row], "user": row % 3}, tensors=TENSORS, samples_are_rows=True)


class Bundle(BundledDataModule):
    """A data module that brings users."""

    def load_datasets(self) -> Datasets:
        return Datasets(TensorDataset(X[:12], Y[:12]), users=torch.arange(12) % 3)


@pytest.mark.parametrize(
    ("dataset", "sizes"),
    [
        (NOTES, [4, 4, 4]),
        (NAMED, [4, 4, 4]),
        (Subset(NOTES, [0, 3, 4, 5]), [2, 1, 1]),
        (ConcatDataset([NOTES, Subset(NOTES, [0])]), [5, 4, 4]),
    ],
)
def test_users_are_found_as_targets_are(dataset: Dataset[Any], sizes: list[int]) -> None:
    data = FederatedDataModule(dataset, partitioner=ByUser(), num_clients=None)
    assert data.train_source().sizes.tolist() == sizes


def test_users_may_be_given() -> None:
    users = [7, 7, 9, 1]
    data = FederatedDataModule(TensorDataset(X[:4]), partitioner=ByUser(), num_clients=3, users=users)
    assert data.split.index.tolist() == [3, 0, 1, 2]
    assert Bundle(partitioner=ByUser(), num_clients=None).split.sizes.tolist() == [4, 4, 4]


# Mistakes


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"val_split": "local"}, "`--data.val_split` to be one of central, per_client, got 'local'."),
        ({"client_test_fraction": 1.0}, "`--data.client_test_fraction` to be at least 0 and below 1, got 1.0."),
        ({"unseen_clients": -1}, "`--data.unseen_clients` to be a number of clients (an integer of at least 0) or a"),
        ({"unseen_clients": 1.5}, "share of them in [0, 1), got 1.5."),
        ({"unseen_clients": True}, "share of them in [0, 1), got True."),
        ({"unseen_clients": float("nan")}, "share of them in [0, 1), got nan."),
        ({"unseen_clients": 8}, "to leave at least one of 8 clients to train, got 8: lower it or raise `--data.num_"),
        ({"unseen_clients": 0.99}, "`--data.unseen_clients` to leave at least one of 8 clients to train, got 0.99"),
        (
            {"val_fraction": 0.6, "val_split": "per_client", "client_test_fraction": 0.4},
            "`--data.val_fraction` and `--data.client_test_fraction` to sum up to less than 1, got 0.6 and 0.4.",
        ),
        (
            {"client_test_fraction": 0.01},
            "`--data.client_test_fraction` to hold out a sample of at least one client, got 0.01 of at most 30 samples",
        ),
        (
            {"val_fraction": 0.01, "val_split": "per_client"},
            "`--data.val_fraction` to hold out a sample of at least one client, got 0.01 of at most 30 samples",
        ),
        ({"users": [1, 2]}, "`--data.users` to hold one value for each of the 240 training samples, got 2."),
        ({"users": 3}, "`--data.users` to hold one value for each of the 240 training samples, got something else."),
        (
            {"partitioner": QuantityDirichlet(0.001), "unseen_clients": 1},
            "samples both of the 1 clients that `--data.unseen_clients` holds out and of the others, got ",
        ),
    ],
)
def test_bad_options_are_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FederatedError) as caught:
        module(**options).test_dataloader()
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_that_is_taken_is_refused_before_any_training() -> None:
    taken = module(unseen_clients=1, test_dataset={"unseen": TensorDataset(X, Y)})
    said = "no test set named unseen beside the one that `--data.unseen_clients` makes, but the data have one: set"
    with pytest.raises(FederatedError, match=said):
        taken.setup("fit")
