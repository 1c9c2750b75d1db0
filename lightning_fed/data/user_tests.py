"""Test samples of users: those of unseen users are evaluated with their training samples, apart from the others."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.fabric.utilities import move_data_to_device
from torch.utils.data import DataLoader, Subset
from typing_extensions import Self

from lightning_fed.data.division import CENTRAL, Division, HeldOut
from lightning_fed.data.inspection import AnyDataset, as_targets, find_users, length
from lightning_fed.data.skews.views import SkewedBatches, SkewedRows, SkewedSets
from lightning_fed.data.sources import EvalBatches
from lightning_fed.errors import FederatedError

if TYPE_CHECKING:
    from lightning_fed.data.loading import Datasets, EvalLoader

__all__ = ["JoinedBatches", "UserTests"]


@dataclass(frozen=True)
class UserTests:
    """A test set divided by whether the user of each sample has training samples at a client that trains.

    Attributes:
        test: The test set.
        known: Its rows of users that do, ascending, shape (samples,), int64.
        unseen: Its other rows, with the client that each belongs to, ``CENTRAL`` for users without training samples.
    """

    test: AnyDataset
    known: npt.NDArray[np.int64]
    unseen: HeldOut

    @classmethod
    def of(cls, datasets: "Datasets", users: npt.NDArray[Any] | None, division: Division) -> Self | None:
        """Divides the test set; None where it stays as it is.

        Args:
            datasets: The data sets; the users of the test samples are ``test_users``, or found in the test set.
            users: The user of each training sample, shape (samples,), None when they are unknown.
            division: What is held out of training.

        Returns:
            None where no client is held out, users are unknown, there is not one test set alone, or all users train.

        Raises:
            FederatedError: If ``test_users`` does not fit the test set.
        """
        test, given = datasets.test, datasets.test_users
        if test is None or isinstance(test, dict) or users is None or not len(division.unseen):
            return None
        own = find_users(test) if given is None else as_targets(given)
        if own is None and given is None:
            return None
        own = _checked(own, users, length(test, "--data.test_dataset"))
        # A user whose samples are all held out for validation is not unseen: choices were made by looking at them.
        unseen = ~np.isin(own, np.delete(users, division.unseen.rows))
        names, first = np.unique(users[division.unseen.rows], return_index=True)
        place = np.minimum(np.searchsorted(names, own[unseen]), len(names) - 1)
        owners = np.where(names[place] == own[unseen], division.unseen.owners[first][place], CENTRAL)
        part = HeldOut(np.flatnonzero(unseen), owners)
        return cls(test, np.flatnonzero(~unseen), part) if len(part) else None

    def seen_set(self) -> AnyDataset | None:
        """Returns the samples of known users, None if there are none."""
        return Subset(self.test, self.known.tolist()) if len(self.known) else None

    def unseen_set(self) -> AnyDataset:
        """Returns the samples of the other users."""
        return Subset(self.test, self.unseen.rows.tolist())

    def skewed(self, sets: SkewedSets, loader: EvalBatches | DataLoader[Any]) -> SkewedBatches:
        """Shows batches of ``unseen_set`` as the held-out clients would see them, and those of none in the new scheme.

        Args:
            sets: The skew of the data module.
            loader: The batches.
        """
        part, num_samples = self.unseen, length(self.test, "--data.test_dataset")
        draws = sets.skew.draws("test", num_samples)[torch.from_numpy(part.rows)]
        schemes = np.where(part.owners == CENTRAL, sets.skew.num_clients, part.owners)
        return SkewedBatches(loader, SkewedRows(sets.skew, draws, schemes))


class JoinedBatches:
    """The batches of several sets, one set after the other; the last batch of each may be short.

    Args:
        loaders: The sets' batches.
    """

    def __init__(self, loaders: Sequence["EvalLoader"]) -> None:
        self._loaders = list(loaders)
        self._device: torch.device | None = None

    @property
    def num_samples(self) -> int:
        """Samples in all sets together."""
        loaders = self._loaders
        return sum(
            length(loader.dataset, "--data") if isinstance(loader, DataLoader) else loader.num_samples
            for loader in loaders
        )

    def __len__(self) -> int:
        """Number of batches."""
        return sum(len(loader) for loader in self._loaders)

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches of the sets as they are."""
        for loader in self._loaders:
            for batch in loader:
                yield move_data_to_device(batch, self._device) if self._device is not None else batch

    def to(self, device: torch.device | str) -> Self:
        """Makes batches arrive on a device; returns itself."""
        self._device = torch.device(device)
        for loader in self._loaders:
            if not isinstance(loader, DataLoader):
                loader.to(device)
        return self


def _checked(own: npt.NDArray[Any] | None, users: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """Compares the users of the test samples with those of the training samples in number and kind."""
    text = [array is not None and array.dtype.kind in "US" for array in (own, users)]
    if own is None or len(own) != size or text[0] != text[1]:
        got = "something else" if own is None else f"{len(own)} {'strings' if text[0] else 'numbers'}"
        raise FederatedError(
            f"Expected one user for each of the {size} test samples, {'strings' if text[1] else 'numbers'} as those of "
            f"the training samples, got {got}: correct `Datasets.test_users`, or `users` of the test set."
        )
    return own
