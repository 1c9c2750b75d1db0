"""Reader of LEAF's JSON: samples that belong to users, in files that are read one after another."""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_fed.core.files import open_regular
from lightning_fed.data.readers.files import found_none
from lightning_fed.errors import FederatedError, expect

__all__ = [
    "LeafUser", "UNREADABLE", "UserSamples", "known_and_unseen", "leaf_files", "leaf_users", "read_leaf",
    "read_text",
]  # fmt: skip

# What a file that is no text, is damaged or does not fit into memory ends in.
UNREADABLE = (OSError, EOFError, ValueError, RecursionError, MemoryError, zlib.error)
_KEYS = ("users", "num_samples", "user_data")


@dataclass(frozen=True)
class UserSamples:
    """Samples and who they belong to.

    Attributes:
        inputs: Tensor of shape (samples, ...).
        labels: int64, shape (samples,).
        users: Index into ``names`` for each sample, int64, shape (samples,).
        names: Names of the users.
    """

    inputs: Tensor
    labels: Tensor
    users: npt.NDArray[np.int64]
    names: list[str]

    def of(self, chosen: npt.NDArray[np.int64]) -> "UserSamples":
        """Returns only the samples of some users, given as indices into ``names``, in unchanged order."""
        return self.where(np.isin(self.users, chosen))

    def where(self, kept: npt.NDArray[np.bool_]) -> "UserSamples":
        """Returns only the samples of some rows, with the names of the users who have any."""
        if kept.all():
            return self
        users, numbers = np.unique(self.users[kept], return_inverse=True)
        rows = torch.from_numpy(kept)
        names = [self.names[user] for user in users]
        return UserSamples(self.inputs[rows], self.labels[rows], numbers.astype(np.int64), names)


def known_and_unseen(
    test: Sequence[str], train: Sequence[str], drawn: Sequence[str]
) -> tuple[npt.NDArray[np.int64], ...]:
    """Finds, by name, the test users that were drawn for training, and those that have no training samples.

    Returns:
        Indices into ``test`` of the known users, their places in ``drawn``, and indices into ``test`` of the unseen
        users. Users who could have been drawn are in neither.
    """
    in_training, places = set(train), {name: place for place, name in enumerate(drawn)}
    known = [number for number, name in enumerate(test) if name in places]
    unseen = [number for number, name in enumerate(test) if name not in in_training]
    return tuple(np.asarray(part, dtype=np.int64) for part in (known, [places[test[n]] for n in known], unseen))


@dataclass(frozen=True)
class LeafUser:
    """One user's entry.

    Attributes:
        name: The user's name.
        data: What the file holds for the user, usually ``x`` and ``y`` of the same length. ``x`` is an array, float32
            of shape (samples, ...), if it holds numbers, else a list.
        place: File and user, for messages.
    """

    name: str
    data: dict[str, Any]
    place: str


def read_leaf(folder: Path) -> UserSamples:
    """Reads numeric samples from a folder of JSON files in the format of LEAF.

    Each file holds ``{"users": [names], "num_samples": [counts], "user_data": {name: {"x": [...], "y": [...]}}}``, and
    perhaps ``hierarchies``, which are not read. To save memory, only the text and the arrays of one file, and the lists
    of one user, are held beside the tensors. Source: S. Caldas et al., "LEAF: A Benchmark for Federated Settings",
    2018, https://arxiv.org/abs/1812.01097. Files, .json or .json.gz, are read in the order of their names.

    Returns:
        Inputs as float32 of shape (samples, ...), labels as int64; users without samples are left out.
    """
    names, inputs, labels = list[str](), list[Tensor](), list[Tensor]()
    for user in leaf_users(folder):
        x, y = _numbers(user)
        if inputs and x.shape[1:] != inputs[0].shape[1:]:
            raise FederatedError(
                f"Expected all samples of one shape, {tuple(inputs[0].shape[1:])} as those of {names[0]}, got "
                f"{tuple(x.shape[1:])} in {user.place}: leave that user out, or change `--data.path`."
            )
        names.append(user.name)
        inputs.append(torch.from_numpy(x))
        labels.append(torch.from_numpy(y))
    users = np.repeat(np.arange(len(names)), [len(part) for part in labels])
    return UserSamples(torch.cat(inputs), torch.cat(labels), users, names)


def leaf_users(path: Path, count: Callable[[LeafUser], int] | None = None) -> Iterator[LeafUser]:
    """Yields every user that has samples, from one .json or .json.gz file or from all files of a folder.

    ``count`` checks one user's entry and counts its samples, which must agree with ``num_samples``; by default it
    expects lists ``x`` and ``y`` of the same length.
    """
    places: dict[str, str] = {}
    for file in leaf_files(path):
        for user in _users_of_file(file, count or _count):
            if user.name in places:
                raise FederatedError(
                    f"Expected every user once, got {user.name} in {places[user.name]} and again in {file}: remove "
                    f"one of them, or change `--data.path`."
                )
            places[user.name] = str(file)
            yield user
    expect(places, f"Expected users with samples in {path}, got none: change `--data.path`.")


def leaf_files(path: Path) -> list[Path]:
    """Returns the JSON files of a folder by name, or the one file that ``path`` is."""
    if path.exists() and not path.is_dir():
        return [path]
    files = sorted(file for file in path.glob("*.json*") if file.name.endswith((".json", ".json.gz")))
    if not files:
        raise found_none(".json files in", path, "--data.path")
    return files


def read_text(path: Path) -> str:
    """Reads a file in UTF-8, packed with gzip if its name ends in ``.gz``."""
    with open_regular(path) as file:
        content = file.read()
    return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")


def _users_of_file(path: Path, count: Callable[[LeafUser], int]) -> list[LeafUser]:
    """Returns the users of a file that have samples, once their counts agree with the lists of the file."""
    content = _decoded(path)
    users = [LeafUser(name, data, f"user {name} of {path}") for name, data in content["user_data"].items()]
    counted = {user.name: count(user) for user in users}
    _check_lists(path, content, counted)
    return [user for user in users if counted[user.name]]


def _decoded(path: Path) -> dict[str, Any]:
    """Reads the JSON of a file; the inputs of a user become an array as soon as the user's entry ends."""

    def entry(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _expect_once((name for name, value in pairs if isinstance(value, dict)), str(path))
        return {name: _as_array(value) if name == "x" else value for name, value in pairs}

    try:
        content = json.loads(read_text(path), object_pairs_hook=entry)
    except FederatedError:
        raise
    except UNREADABLE as error:
        first = str(error).split("\n")[0] or type(error).__name__
        raise FederatedError(
            f"The file {path} cannot be read as JSON ({first}): it is truncated or damaged; write it "
            f"again, or change `--data.path`."
        ) from error
    held = content if isinstance(content, dict) else {}
    missing = [key for key in _KEYS if key not in held]
    if not missing and not isinstance(held["user_data"], dict):
        missing = ["user_data by name"]
    keys = f"LEAF's keys users, num_samples and user_data in {path}"
    expect(not missing, f"Expected {keys}, got no {', '.join(missing[:1])}: change `--data.path`.")
    return held


def _as_array(values: Any) -> Any:
    """Makes a float32 array of nested lists of numbers, and leaves anything else as it is."""
    if not isinstance(values, list):
        return values
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        return values
    return array.astype(np.float32) if array.dtype.kind in "iuf" else values


def _check_lists(path: Path, head: Mapping[str, Any], counted: Mapping[str, int]) -> None:
    """Refuses a file whose lists of users and counts do not agree with its entries."""

    def agree(holds: bool, what: str, got: str) -> None:
        expect(holds, f"Expected {what}, got {got}: write the file again, or change `--data.path`.")

    users, counts = head["users"], head["num_samples"]
    alike = isinstance(users, list) and isinstance(counts, list) and len(users) == len(counts)
    got = f"{_described(users)} and {_described(counts)}"
    agree(alike, f"users and num_samples in {path} to be lists of the same length", got)
    agree(all(isinstance(user, str) for user in users), f"users in {path} to be a list of names", "other values in it")
    _expect_once(users, f"users of {path}")
    for user, number in zip(users, counts, strict=True):
        agree(user in counted, f"user_data in {path} to hold every user of its list", f"no {user}")
        said = f"{number} samples of user {user} in {path}, as its num_samples says"
        agree(counted[user] == number, said, str(counted[user]))
    # LEAF's own script drops users from the list, but leaves their entries behind, without samples.
    listed = set(users)
    for user, number in counted.items():
        known = not number or user in listed
        agree(known, f"user_data in {path} to hold the users of its list only", f"{user} as well")


def _expect_once(users: Iterable[str], place: str) -> None:
    for user, number in Counter(users).items():
        expect(number == 1, f"Expected every user once, got {user} twice in {place}: change `--data.path`.")


def _count(user: LeafUser) -> int:
    """Counts samples that are stored as lists ``x`` and ``y``."""
    x, y = (user.data.get(key) if isinstance(user.data, dict) else None for key in ("x", "y"))
    if not isinstance(x, (list, np.ndarray)) or not isinstance(y, list) or len(x) != len(y):
        raise FederatedError(
            f"Expected x and y of {user.place} to be lists of the same length, got {_described(x)} and "
            f"{_described(y)}: write the file again."
        )
    return len(y)


def _numbers(user: LeafUser) -> tuple[Any, Any]:
    """Makes arrays of one user's samples: float32 of shape (n, ...) and int64 of shape (n,)."""
    x = user.data["x"]
    if isinstance(x, list):
        is_text = any(isinstance(value, str) for value in np.array(x, dtype=object).ravel())
        raise FederatedError(
            f"Expected x of {user.place} to be samples of one shape that hold only numbers, got "
            f"{'text' if is_text else 'lists of different lengths or other values'}: write the file again."
        )
    y = user.data["y"]
    wrong = [label for label in y if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < 2**63]
    if wrong:
        raise FederatedError(
            f"Expected y of {user.place} to be whole numbers from 0 to 2**63 - 1, got {wrong[0]!r}: write it again."
        )
    return x, np.asarray(y, dtype=np.int64)


def _described(value: object) -> str:
    return f"{len(value)} entries" if isinstance(value, (list, np.ndarray)) else type(value).__name__
