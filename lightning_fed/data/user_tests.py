"""Finds the test samples of unseen users, which move to the test set ``unseen``, and those of each client."""

from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_fed.data.holdout import CENTRAL, Division, HeldOut
from lightning_fed.data.inspection import as_targets, find_users, length
from lightning_fed.data.loading import Datasets
from lightning_fed.data.split import Split
from lightning_fed.errors import FederatedError

__all__ = ["divide_by_user", "own_samples"]


def divide_by_user(
    datasets: Datasets, users: npt.NDArray[Any] | None, division: Division
) -> tuple[npt.NDArray[np.int64], HeldOut] | None:
    """Separates the test samples of unseen users, who have no training samples at clients that train.

    The users of the test samples are ``test_users``, or found in the test set; ``users`` belong to the training set.

    Returns:
        The rows of all other users, ascending, int64; and the rows of unseen users with their clients, ``CENTRAL`` for
        users without training samples. None if no client is held out, users are unknown, there is not exactly one test
        set, or no user is unseen.
    """
    own = _users_of(datasets.test, datasets.test_users, users) if len(division.unseen) else None
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
    own, split = _users_of(dataset, given, users), division.split
    if own is None or users is None or len(names := np.unique(users)) != division.num_owners:
        return None
    names = names[division.numbers]
    place = np.minimum(np.searchsorted(names, own), len(names) - 1)
    rows = np.flatnonzero(names[place] == own)
    if not len(rows) or (users[split.index] != names[split.owners]).any():
        return None
    rows = rows[np.argsort(place[rows], kind="stable")]
    return Split(rows, np.searchsorted(place[rows], np.arange(len(names) + 1)))


def _users_of(dataset: Any, given: Any, users: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
    """Returns the user of each sample of one set; None if they, or those of the training samples, are unknown."""
    if dataset is None or isinstance(dataset, dict) or users is None:
        return None
    own = find_users(dataset) if given is None else as_targets(given)
    return None if own is None and given is None else _checked(own, users, length(dataset, "--data.test_dataset"))


def _checked(own: npt.NDArray[Any] | None, users: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """Refuses test users that are not one for each sample, or of another kind than the training users."""
    text = [array is not None and array.dtype.kind in "US" for array in (own, users)]
    if own is None or len(own) != size or text[0] != text[1]:
        got = "something else" if own is None else f"{len(own)} {'strings' if text[0] else 'numbers'}"
        raise FederatedError(
            f"Expected one user for each of the {size} test samples, {'strings' if text[1] else 'numbers'} as those of "
            f"the training samples, got {got}: correct `Datasets.test_users`, or `users` of the test set."
        )
    return own
