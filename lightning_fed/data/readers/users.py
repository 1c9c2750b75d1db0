"""Samples that belong to users, and which test users are known or unseen."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["UserSamples", "known_and_unseen", "places_of"]


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
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Finds, by name, the test users that were drawn for training, and those that have no training samples.

    Returns:
        Indices into ``test`` of the known and of the unseen users. Users who could have been drawn are in neither.
    """
    in_training, taking_part = set(train), set(drawn)
    known = [number for number, name in enumerate(test) if name in taking_part]
    unseen = [number for number, name in enumerate(test) if name not in in_training]
    return np.asarray(known, dtype=np.int64), np.asarray(unseen, dtype=np.int64)


def places_of(names: Sequence[str], among: Sequence[str]) -> npt.NDArray[np.int64]:
    """Returns the place of each name in another list, which must hold all of them; shape (names,)."""
    places = {name: place for place, name in enumerate(among)}
    return np.asarray([places[name] for name in names], dtype=np.int64)
