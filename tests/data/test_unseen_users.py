"""Users that are held out entirely: none of their samples is in the test set of those that train."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_fed.data import (
    FEMNIST,
    IID,
    ByUser,
    ClientDatasets,
    ClientRotation,
    Datasets,
    FederatedDataModule,
    Shakespeare,
)
from lightning_fed.data.datasets.bundled import UserDataModule
from lightning_fed.data.inspection import first_input
from lightning_fed.data.skews import DataFacts
from lightning_fed.data.summary import overview
from lightning_fed.errors import FederatedError
from lightning_fed.models import ImageClassifier, LogisticRegression
from tests.parts import federated_trainer, lightning_trainer
from tests.user_files import images_of, write_femnist, write_leaf, write_speech

Sample = tuple[tuple[float, ...], int]


def samples(loader: Any) -> list[Sample]:
    return [(tuple(x.flatten().tolist()), int(y)) for xs, ys in loader for x, y in zip(xs, ys, strict=True)]


def of_dataset(dataset: Dataset[Any]) -> list[Sample]:
    return samples(DataLoader(dataset, 7))


def femnist(root: Path) -> Path:
    return write_femnist(root, users=12, unseen=False)


def speech(root: Path) -> Path:
    write_speech(root / "shakespeare" / "by_role.json.gz", roles=6, length=1080)
    return root


def leaf_speech(root: Path) -> Path:
    """LEAF's JSON for Shakespeare, where the test files hold the roles in another order."""
    texts = {f"R{role}": "".join(np.random.default_rng(role).choice(list("abcdefgh "), 130)) for role in range(6)}
    for part, kept in (("train", range(30)), ("test", range(31, 49, 3))):
        entries = {
            name: {"x": [text[i : i + 80] for i in kept], "y": [text[i + 80] for i in kept]}
            for name, text in (texts.items() if part == "train" else reversed(texts.items()))
        }
        write_leaf(root / "shakespeare" / part / "a.json", entries)
    return root


CASES: list[Any] = [
    pytest.param(FEMNIST, femnist, {}, id="femnist"),
    pytest.param(Shakespeare, speech, {}, id="shakespeare-by-time"),
    pytest.param(Shakespeare, leaf_speech, {"path": "shakespeare"}, id="shakespeare-leaf"),
]


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize(("kind", "write", "options"), CASES)
def test_all_samples_of_unseen_users_are_the_test_set_unseen(
    kind: type[UserDataModule], write: Callable[[Path], Path], options: dict[str, Any], in_memory: bool, tmp_path: Path
) -> None:
    options = {"root": write(tmp_path), "split_seed": 0, "eval_batch_size": 7, **options}
    whole = kind(**options).load_datasets()
    data = kind(**options, unseen_clients=3, in_memory=in_memory)
    names = np.unique(whole.users)
    seen = names[data.division.numbers]
    assert len(seen) == len(names) - 3
    train, test = of_dataset(whole.train), of_dataset(whole.test)
    of_seen = np.isin(whole.users, seen)
    test_of_seen = np.isin(whole.test_users, seen)
    assert 0 < test_of_seen.sum() < len(test)
    loaders: Any = data.test_dataloader()
    assert list(loaders) == ["test", "unseen"]
    assert samples(loaders["test"]) == [sample for sample, known in zip(test, test_of_seen, strict=True) if known]
    expected = [sample for part, known in ((train, of_seen), (test, test_of_seen))
                for sample, is_known in zip(part, known, strict=True) if not is_known]  # fmt: skip
    assert sorted(samples(loaders["unseen"])) == sorted(expected)
    assert loaders["unseen"].num_samples == len(expected)
    assert len(loaders["unseen"]) == len(list(loaders["unseen"]))
    trained = [data.train_source().batches(client, torch.arange(size), 0)
               for client, size in enumerate(data.split.sizes)]  # fmt: skip
    assert sorted(sample for batches in trained for sample in samples(batches)) == sorted(
        sample for sample, known in zip(train, of_seen, strict=True) if known
    )


def test_the_files_give_the_user_of_each_test_sample(tmp_path: Path) -> None:
    """Labels of the tests' FEMNIST tell the writer, also where fewer writers are drawn, and in another order."""
    write_femnist(tmp_path, users=12, unseen=False)
    tests = {f"f{user:04d}": images_of(user, 3) for user in range(11, -1, -1)}
    write_leaf(tmp_path / "femnist" / "test" / "all_data_0.json", tests)
    data = FEMNIST(root=tmp_path, num_clients=5)
    datasets, drawn = data.load_datasets(), data.draw(12)
    assert isinstance(datasets.test, TensorDataset)
    assert datasets.test.tensors[1].tolist() == [
        (int(drawn[user]) * 3 + number % 3) % 62 for number, user in enumerate(datasets.test_users)
    ]
    assert datasets.test_users.tolist() == np.repeat([4, 3, 2, 1, 0], 3).tolist()


def test_without_unseen_clients_the_test_set_stays_whole(tmp_path: Path) -> None:
    data = FEMNIST(root=femnist(tmp_path), split_seed=0)
    loader: Any = data.test_dataloader()
    assert loader.num_samples == 24
    options: dict[str, Any] = {"partitioner": IID(), "num_clients": 4, "unseen_clients": 1}
    mixed: Any = FEMNIST(root=tmp_path, split_seed=0, **options).test_dataloader()
    # Every writer has samples at clients that train, though one client does not.
    assert {name: part.num_samples for name, part in mixed.items()} == {"test": 24, "unseen": 15}


def test_each_set_is_evaluated_under_its_name(tmp_path: Path) -> None:
    data = FEMNIST(root=femnist(tmp_path), split_seed=0, unseen_clients=0.25, client_test_fraction=0.2)
    sizes = {line.split()[1]: line.split()[2] for line in overview(data).splitlines() if line.startswith("test ")}
    assert sizes == {"test": "18", "clients": "9", "unseen": "21"}
    trainer = federated_trainer(tmp_path, max_rounds=1, clients_per_round=2, check_test_every_n_rounds=1)
    trainer.fit(ImageClassifier(LogisticRegression(784, num_classes=62), num_classes=62), data)
    assert {"test/acc/test", "test/acc/clients", "test/acc/unseen"} <= trainer.callback_metrics.keys()


def test_lightnings_own_trainer_reads_the_sets_as_well(tmp_path: Path) -> None:
    data = FEMNIST(root=femnist(tmp_path), split_seed=0, unseen_clients=3)
    model = ImageClassifier(LogisticRegression(784, num_classes=62), num_classes=62)
    assert len(lightning_trainer(tmp_path).test(model, data, verbose=False)) == 2


# Data of the user's own

X = torch.rand(40, 1, 6, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 4
USERS = np.repeat([f"u{i}" for i in range(8)], 5)
TEST_USERS = np.array([f"u{i % 10}" for i in range(30)])  # two of them in no training sample


class WithUsers(TensorDataset):
    """Samples that know their users."""

    def __init__(self, x: Tensor, y: Tensor, users: np.ndarray) -> None:
        super().__init__(x, y)
        self.users = users


class Own(FederatedDataModule):
    """A data module whose test users are given beside the data."""

    def __init__(self, test_users: Any, **options: Any) -> None:
        super().__init__(None, partitioner=ByUser(), num_clients=None, split_seed=0, unseen_clients=2, **options)
        self.test_users = test_users

    def load_datasets(self) -> Datasets:
        return Datasets(
            TensorDataset(X, Y), test=TensorDataset(X[:30], Y[:30]), users=USERS, test_users=self.test_users
        )


def own(**options: Any) -> FederatedDataModule:
    return FederatedDataModule(
        WithUsers(X, Y, USERS), test_dataset=WithUsers(X[:30], Y[:30], TEST_USERS), partitioner=ByUser(),
        num_clients=None, split_seed=0, unseen_clients=2, **options,
    )  # fmt: skip


@pytest.mark.parametrize("data", [own(), Own(TEST_USERS), Own(TEST_USERS.tolist())])
def test_users_of_a_test_set_are_found_or_given(data: FederatedDataModule) -> None:
    seen = [f"u{number}" for number in data.division.numbers]
    loaders: Any = data.test_dataloader()
    known = np.isin(TEST_USERS, seen)
    assert loaders["test"].num_samples == known.sum() == 18
    train = ~np.isin(USERS, seen)
    expected = [
        *of_dataset(TensorDataset(X[train], Y[train])),
        *of_dataset(TensorDataset(X[:30][~known], Y[:30][~known])),
    ]
    assert samples(loaders["unseen"])[10:] == expected[10:]
    assert sorted(samples(loaders["unseen"])) == sorted(expected)


def test_a_user_that_was_validated_on_is_not_unseen() -> None:
    users, own_test = np.array([*USERS[:39], "single"]), np.array(["single"] * 30)
    for seed in range(200):
        data = FederatedDataModule(
            TensorDataset(X, Y), users=users, test_dataset=WithUsers(X[:30], Y[:30], own_test), partitioner=ByUser(),
            num_clients=None, split_seed=seed, unseen_clients=2, val_fraction=0.5,
        )  # fmt: skip
        if 39 in data.division.val.rows:
            loaders: Any = data.test_dataloader()
            assert loaders["test"].num_samples == 30
            return
    raise AssertionError("expected the sample to be validated on in one of 200 draws")


def test_a_test_set_of_unseen_users_alone_leaves_none_named_test() -> None:
    data = own()
    unseen = [f"u{number}" for number in range(8) if number not in data.division.numbers]
    loaders: Any = Own(np.resize(unseen, 30)).test_dataloader()
    assert list(loaders) == ["unseen"]
    assert loaders["unseen"].num_samples == 40


def test_under_a_skew_test_samples_of_an_unseen_user_have_its_scheme() -> None:
    data = own(skew=ClientRotation(), eval_batch_size=7)
    loaders: Any = data.test_dataloader()
    assert list(loaders) == ["seen_schemes", "new_scheme", "unseen"]
    division = data.division
    unseen = sorted(set(range(8)) - set(division.numbers.tolist()))
    scheme = {**{f"u{number}": 6 + place for place, number in enumerate(unseen)}, "u8": 8, "u9": 8}
    rows = [row for row, user in enumerate(TEST_USERS) if user in scheme]
    skew = ClientRotation().prepare(8, 0, DataFacts(first_input(TensorDataset(X)), 4))
    schemes = torch.tensor([scheme[TEST_USERS[row]] for row in rows])
    expected, _ = skew.apply([X[rows], Y[rows]], schemes, skew.draws("test", 30)[torch.tensor(rows)])
    shown = torch.cat([x for x, _ in loaders["unseen"]])
    assert torch.equal(shown[10:], expected)
    assert len(shown) == 10 + len(rows) == 22


@pytest.mark.parametrize(
    ("test_users", "words"),
    [
        (np.arange(30), "for each of the 30 test samples, strings as those of the training samples, got 30 numbers: "),
        (TEST_USERS[:4], "got 4 strings: correct `Datasets.test_users`"),
        ([["u1"]] * 30, "got something else: correct `Datasets.test_users`"),
    ],
)
def test_test_users_that_do_not_fit(test_users: Any, words: str) -> None:
    with pytest.raises(FederatedError, match="Expected one user for each") as caught:
        Own(test_users).test_dataloader()
    assert words in str(caught.value)


def test_two_sets_of_unseen_users_are_refused(tmp_path: Path) -> None:
    write_femnist(tmp_path, users=12, unseen=True)
    said = r"Expected `--data\.unseen_clients 0` with test files of users .* got "
    with pytest.raises(FederatedError, match=said + "3: "):
        FEMNIST(root=tmp_path, unseen_clients=3).setup()
    leaf_speech(tmp_path)
    text = "ab" * 50
    write_leaf(tmp_path / "shakespeare" / "test" / "b.json", {"new": {"x": [text[:80]], "y": [text[80]]}})
    with pytest.raises(FederatedError, match=said + r"0\.5: "):
        Shakespeare("shakespeare", root=tmp_path, unseen_clients=0.5).setup()


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize(("cls", "write", "options"), CASES)
def test_each_client_is_evaluated_on_the_test_samples_of_its_users(
    cls: type[UserDataModule], write: Callable[[Path], Path], options: dict[str, Any], in_memory: bool, tmp_path: Path
) -> None:
    data = cls(root=write(tmp_path), unseen_clients=2, in_memory=in_memory, eval_batch_size=3, **options)
    data.setup()
    loaded = data.load_datasets()
    whole, train_users = of_dataset(loaded.test), np.asarray(loaded.users)
    source = data.held_out_source("test")
    for client in range(data.split.num_clients):
        (user,) = np.unique(train_users[data.split.index[data.split.offsets[client] : data.split.offsets[client + 1]]])
        expected = [sample for sample, own in zip(whole, np.asarray(loaded.test_users), strict=True) if own == user]
        assert samples(source.batches(client, torch.arange(int(source.sizes[client])), 0)) == expected
    assert source.sizes.sum() == len(samples(data.test_dataloader()["test"]))


def test_clients_that_share_users_have_no_test_samples_of_their_own(tmp_path: Path) -> None:
    data = FEMNIST(root=femnist(tmp_path), partitioner=IID(), num_clients=4)
    with pytest.raises(FederatedError, match="client_test_fraction 0.2`, or give a test set that knows its users"):
        data.held_out_source("test")


def test_clients_that_come_as_data_sets_may_bring_test_sets_too() -> None:
    def of(client: int, size: int) -> TensorDataset:
        return TensorDataset(torch.full((size, 1), float(client)), torch.arange(size) % 2)

    own = ClientDatasets([of(5, 2), of(6, 1), of(7, 3)])
    data = FederatedDataModule(
        [of(0, 4), of(1, 3), of(2, 5)], test_dataset=own, val_dataset=own, client_test_fraction=0
    )
    for part in ("test", "val"):
        source = data.held_out_source(part)
        found = [
            batch[0].unique().tolist()
            for i in range(3)
            for batch in source.batches(i, torch.arange(source.sizes[i]), 0)
        ]
        assert (source.sizes.tolist(), found) == ([2, 1, 3], [[5.0], [6.0], [7.0]])
    data = FederatedDataModule([of(0, 40), of(1, 30)], test_dataset=own, client_test_fraction=0.1)
    assert data.held_out_source("test").sizes.tolist() == [4, 3], "samples that were held out come first"
