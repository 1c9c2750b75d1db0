"""How data are divided: what each client trains on, what is held out to evaluate, and whose test samples are."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from lightning_fed.core.seeding import Purpose, numpy_generator_for
from lightning_fed.data.inspection import as_targets, find_users, length
from lightning_fed.data.partitioners import Partitioner
from lightning_fed.data.split import Split
from lightning_fed.errors import FederatedError, expect_choice, expect_number, is_count, is_number

__all__ = [
    "CENTRAL", "Division", "DivisionOptions", "HeldOut", "ValSplit", "client_names", "divide", "own_samples",
    "unseen_users",
]  # fmt: skip

ValSplit: TypeAlias = Literal["central", "per_client"]
_Rows: TypeAlias = npt.NDArray[np.int64]

CENTRAL = -1  # the owner of a row that belongs to no client

# Random streams of Purpose.SPLIT; the partitioner uses 0.
_VAL, _UNSEEN, _WITHIN = 1, 2, 3


@dataclass(frozen=True)
class DivisionOptions:
    """What is held out of training; the options of ``FederatedDataModule`` of the same names."""

    val_fraction: float = 0.0
    val_split: ValSplit = "central"
    unseen_clients: int | float = 0
    client_test_fraction: float = 0.0

    def __post_init__(self) -> None:
        expect_number("--data.val_fraction", self.val_fraction, least=0, below=1)
        expect_number("--data.client_test_fraction", self.client_test_fraction, least=0, below=1)
        expect_choice("--data.val_split", self.val_split, get_args(ValSplit))
        unseen = self.unseen_clients
        if not is_count(unseen, least=0) and not is_number(unseen, least=0, below=1):
            raise FederatedError(
                "Expected `--data.unseen_clients` to be a number of clients (an integer of at least 0) or a share of "
                f"them in [0, 1), got {unseen!r}."
            )
        if self.val_split == "per_client" and self.val_fraction + self.client_test_fraction >= 1:
            raise FederatedError(
                "Expected `--data.val_fraction` and `--data.client_test_fraction` to sum up to less than 1, got "
                f"{self.val_fraction} and {self.client_test_fraction}."
            )

    def count_unseen(self, num_clients: int) -> int:
        """Returns how many of the clients are held out."""
        unseen = self.unseen_clients
        share = max(1, round(unseen * num_clients)) if unseen > 0 else 0
        count = int(unseen) if is_count(unseen, least=0) else share
        if count >= num_clients:
            raise FederatedError(
                f"Expected `--data.unseen_clients` to leave at least one of {num_clients} clients to train, got "
                f"{unseen}: lower it or raise `--data.num_clients`."
            )
        return count


@dataclass(frozen=True)
class HeldOut:
    """Rows of the training set that no client trains on.

    Attributes:
        rows: Row numbers, shape (samples,), int64.
        owners: The client of each row, ``CENTRAL`` for none, shape (samples,), int64. Clients that train have the lower
            numbers, those that do not the higher ones.
    """

    rows: _Rows
    owners: _Rows

    def __len__(self) -> int:
        return len(self.rows)


_NOTHING = HeldOut(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


@dataclass(frozen=True)
class Division:
    """How the training set is divided under one seed: each row is in exactly one part.

    Attributes:
        seed: The seed.
        split: What the clients train on.
        numbers: The number that each training client had before clients were held out, shape (clients,), int64: for
            ``ByUser`` its place among all users in ascending order.
        num_owners: Number of clients, including those that do not train.
        val: The validation set.
        clients: Test samples of the clients that train, client after client.
        unseen: All samples of the clients that do not train, client after client.
    """

    seed: int
    split: Split
    numbers: _Rows
    num_owners: int
    val: HeldOut = _NOTHING
    clients: HeldOut = _NOTHING
    unseen: HeldOut = _NOTHING

    def tests(self) -> dict[str, HeldOut]:
        """Returns the test sets that were held out, by name."""
        return {name: part for name, part in (("clients", self.clients), ("unseen", self.unseen)) if len(part)}

    def owners(self, num_samples: int) -> _Rows:
        """Returns the client that each training sample belongs to, ``CENTRAL`` for none; shape (num_samples,)."""
        owners = np.full(num_samples, CENTRAL, dtype=np.int64)
        owners[self.split.index] = self.split.owners
        for part in (self.val, self.clients, self.unseen):
            owners[part.rows] = part.owners
        return owners

    def hash(self) -> str:
        """SHA-256 in hexadecimal of the split, and of the held-out test sets if there are any.

        A validation set needs no entry: it is what the other parts leave.
        """
        tests = self.tests()
        if not tests:
            return self.split.hash()
        digest = hashlib.sha256(self.split.hash().encode())
        for name, part in tests.items():
            digest.update(name.encode() + part.rows.astype("<i8").tobytes() + part.owners.astype("<i8").tobytes())
        return digest.hexdigest()


def divide(
    options: DivisionOptions,
    partitioner: Partitioner,
    targets: npt.NDArray[Any] | None,
    users: npt.NDArray[Any] | None,
    num_samples: int,
    num_clients: int | None,
    seed: int,
) -> Division:
    """Divides the training set, as a pure function of the arguments.

    A central validation set is drawn before the split, so that it does not depend on the split. But if the partitioner
    reads users, or clients are held out, the split comes first, and the set is drawn from the samples of the other
    clients. ``targets`` and ``users``, shape (num_samples,), hold one value per row, or are None. ``num_clients``
    includes clients that are held out; it is None if the partitioner counts the clients itself.
    """
    values = users if partitioner.reads == "users" else targets
    num_clients = partitioner.count_clients(values, num_clients)
    num_unseen = options.count_unseen(num_clients)
    central = options.val_fraction if options.val_split == "central" else 0.0
    before = num_unseen == 0 and partitioner.reads != "users"
    is_val = _share_of(num_samples, central if before else 0.0, seed)
    rows, val = np.flatnonzero(~is_val), np.flatnonzero(is_val)
    split = Split.of(partitioner(None if values is None else values[rows], len(rows), num_clients, seed))
    split = Split(rows[split.index], split.offsets)
    split, numbers, unseen = _hold_out_clients(split, num_unseen, seed)
    if not before:
        is_val = _share_of(len(split.index), central, seed)
        split, val = split.keep(~is_val), np.sort(split.index[is_val])
    split, clients, own_val = _hold_out_within(split, options, seed)
    if not len(split.index):
        raise FederatedError(
            f"Expected `--data.val_fraction` to leave samples to train on, got {options.val_fraction}: lower it."
        )
    val_part = own_val if len(own_val) else HeldOut(val, np.full(len(val), CENTRAL))
    return Division(seed, split, numbers, num_clients, val_part, clients, unseen)


def _share_of(num_samples: int, fraction: float, seed: int) -> npt.NDArray[np.bool_]:
    """Marks a random share of the samples, at least one if the share is above 0."""
    count = max(1, round(fraction * num_samples)) if fraction > 0 else 0
    mask = np.zeros(num_samples, dtype=bool)
    mask[numpy_generator_for(seed, Purpose.SPLIT, round=_VAL).permutation(num_samples)[:count]] = True
    return mask


def _hold_out_clients(split: Split, count: int, seed: int) -> tuple[Split, _Rows, HeldOut]:
    """Holds out random clients; returns the split of the others, their numbers, and the held-out samples."""
    stays = np.ones(split.num_clients, dtype=bool)
    generator = numpy_generator_for(seed, Purpose.SPLIT, round=_UNSEEN)
    stays[generator.choice(split.num_clients, count, replace=False)] = False
    if count == 0:
        return split, np.arange(split.num_clients), _NOTHING
    left = stays[split.owners]
    others = split.keep(left, stays)
    if not len(others.index) or left.all():
        raise FederatedError(
            f"Expected samples both of the {count} clients that `--data.unseen_clients` holds out and of the others, "
            f"got {(~left).sum()} and {left.sum()}: set `--data.partitioner.min_samples 1`, or change "
            "`--data.split_seed`."
        )
    number = np.cumsum(~stays) - 1 + others.num_clients
    return others, np.flatnonzero(stays), HeldOut(split.index[~left], number[split.owners[~left]])


def _hold_out_within(split: Split, options: DivisionOptions, seed: int) -> tuple[Split, HeldOut, HeldOut]:
    """Holds out shares of each client's samples for test and validation, rounded down, so that each keeps one."""
    val_fraction = options.val_fraction if options.val_split == "per_client" else 0.0
    if options.client_test_fraction == val_fraction == 0:
        return split, _NOTHING, _NOTHING
    # A client's samples in random order: the first are for test, the next for validation.
    keys = numpy_generator_for(seed, Purpose.SPLIT, round=_WITHIN).random(len(split.index))
    rank = np.empty(len(keys), dtype=np.int64)
    rank[np.lexsort((keys, split.owners))] = np.arange(len(keys)) - split.offsets[split.owners]
    # The addend corrects rounding: 0.29 * 100 is a little less than 29.
    shares = np.array([[options.client_test_fraction], [val_fraction]])
    num_test, num_val = (shares * split.sizes + 1e-9).astype(np.int64)
    is_test = rank < num_test[split.owners]
    is_val = ~is_test & (rank < (num_test + num_val)[split.owners])
    for option, share, part in (
        ("client_test_fraction", options.client_test_fraction, is_test), ("val_fraction", val_fraction, is_val),
    ):  # fmt: skip
        if share > 0 and not part.any():
            raise FederatedError(
                f"Expected `--data.{option}` to hold out a sample of at least one client, got {share} of at most "
                f"{split.sizes.max()} samples: raise it or lower `--data.num_clients`."
            )
    test, val = (HeldOut(split.index[mask], split.owners[mask]) for mask in (is_test, is_val))
    return split.keep(~(is_test | is_val)), test, val


def unseen_users(
    dataset: Any, given: Any, users: npt.NDArray[Any] | None, division: Division
) -> tuple[_Rows, HeldOut] | None:
    """Separates the test samples of unseen users, who have no training samples at clients that train.

    ``given`` are the users of the test set, found in it if None; ``users`` belong to the training set.

    Returns:
        The rows of all other users, ascending, int64; and the rows of unseen users with their clients, ``CENTRAL`` for
        users without training samples. None if no client is held out, users are unknown, there is not exactly one test
        set, or no user is unseen.
    """
    own = _users_of(dataset, given, users) if len(division.unseen) else None
    if own is None or users is None:
        return None
    # A user whose samples are all in the validation set is not unseen: choices were made by looking at them.
    unseen = ~np.isin(own, np.delete(users, division.unseen.rows))
    if not unseen.any():
        return None
    names, first = np.unique(users[division.unseen.rows], return_index=True)
    place = np.minimum(np.searchsorted(names, own[unseen]), len(names) - 1)
    owners = np.where(names[place] == own[unseen], division.unseen.owners[first][place], CENTRAL)
    return np.flatnonzero(~unseen), HeldOut(np.flatnonzero(unseen), owners)


def own_samples(dataset: Any, given: Any, users: npt.NDArray[Any] | None, division: Division) -> Split | None:
    """Finds the rows of a set that belong to each training client, by its user; None unless each client is one user.

    ``given`` are the users of the set, found in it if None; ``users`` belong to the training set.
    """
    own, names = _users_of(dataset, given, users), _clients_users(users, division)
    if own is None or names is None:
        return None
    names = names[: division.split.num_clients]
    place = np.minimum(np.searchsorted(names, own), len(names) - 1)
    rows = np.flatnonzero(names[place] == own)
    if not len(rows):
        return None
    rows = rows[np.argsort(place[rows], kind="stable")]
    return Split(rows, np.searchsorted(place[rows], np.arange(len(names) + 1)))


def client_names(
    users: npt.NDArray[Any] | None, called: Sequence[str] | None, division: Division
) -> tuple[str, ...] | None:
    """Returns what clients are called, first those that train: users, or ``called`` of their numbers; else None."""
    own = _clients_users(users, division)
    names = () if own is None else tuple(str(user) if called is None else called[user] for user in own)
    return None if names == tuple(map(str, range(len(names)))) else names


def _clients_users(users: npt.NDArray[Any] | None, division: Division) -> npt.NDArray[Any] | None:
    """Returns the user of each client, ascending, those that train first; None unless each client is one user."""
    if users is None or len(names := np.unique(users)) != division.num_owners:
        return None
    others = np.setdiff1d(np.arange(division.num_owners), division.numbers)
    names, split = names[np.concatenate([division.numbers, others])], division.split
    return None if (users[split.index] != names[split.owners]).any() else names


def _users_of(dataset: Any, given: Any, users: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
    """Returns the user of each sample of one set; None if they, or those of the training samples, are unknown."""
    if dataset is None or isinstance(dataset, dict) or users is None:
        return None
    own = find_users(dataset) if given is None else as_targets(given)
    if own is None and given is None:
        return None
    size = length(dataset, "--data.test_dataset")
    text = [array is not None and array.dtype.kind in "US" for array in (own, users)]
    if own is None or len(own) != size or text[0] != text[1]:
        got = "something else" if own is None else f"{len(own)} {'strings' if text[0] else 'numbers'}"
        raise FederatedError(
            f"Expected one user for each of the {size} test samples, {'strings' if text[1] else 'numbers'} as those of "
            f"the training samples, got {got}: correct `Datasets.test_users`, or `users` of the test set."
        )
    return own
