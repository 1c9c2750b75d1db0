"""The base of data modules whose samples belong to users."""

import os
from abc import ABC
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_fed.data.datasets.bundled import BundledDataModule
from lightning_fed.data.partitioners import ByUser, Partitioner
from lightning_fed.data.readers.downloads import data_folder, found_none
from lightning_fed.errors import FederatedError, expect_count

__all__ = ["UserDataModule"]


class UserDataModule(BundledDataModule, ABC):
    """Base of data modules whose samples belong to users: where their files are, and which users take part.

    Args:
        path: Folder or file, relative to ``root``.
        root: Folder of data sets; by default ``LIGHTNING_FED_DATA``, or the current folder if that is not set.
        num_clients: Number of clients; one for each user if not given.
        partitioner: How the samples are split over the clients.
        num_users: How many users take part, drawn by ``draw_seed``. By default ``num_clients`` if each user becomes a
            client, else all users.
        draw_seed: Seed of that draw. It is apart from the run's seed, so that all runs use the same users.
        **kwargs: Every other option of ``BundledDataModule``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        root: str | os.PathLike[str] | None = None,
        num_clients: int | None = None,
        partitioner: Partitioner = ByUser(),  # noqa: B008 - holds no state
        num_users: int | None = None,
        draw_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_clients=num_clients, partitioner=partitioner, **kwargs)
        if num_users is not None:
            expect_count("--data.num_users", num_users)
        expect_count("--data.draw_seed", draw_seed, least=0)
        self.path = path
        self.root = root
        self.num_users = num_users
        self.draw_seed = draw_seed

    @property
    def place(self) -> Path:
        """The folder or file."""
        place = (data_folder(self.root) or Path()) / Path(self.path).expanduser()
        if not place.exists():
            raise found_none("the file or folder", place, "--data.path")
        return place

    def identity(self) -> list[str]:
        """Adds which users were drawn."""
        return [*super().identity(), f"{self.num_users} of the users, {self.num_clients} clients, {self.draw_seed}"]

    def test_sets(self, known: Any, unseen: Any, users: npt.NDArray[np.int64]) -> dict[str, Any]:
        """Returns the options of ``Datasets`` for test sets of known and of unseen users.

        Args:
            known: Test samples of users who take part in training; empty or None for none.
            unseen: Test samples of users who are not in the training files.
            users: The user of each known sample, as a place among the users who take part, shape (samples,).
        """
        sets = {name: part for name, part in (("test", known), ("unseen", unseen)) if part is not None and len(part)}
        if "unseen" in sets and self.held_out.unseen_clients:
            raise FederatedError(
                "Expected `--data.unseen_clients 0` with test files of users that are not in the training files, got "
                f"{self.held_out.unseen_clients}: set it to 0, or leave these test files out."
            )
        single = list(sets) == ["test"]
        return {"test": sets["test"] if single else sets or None, "test_users": users if single else None}

    def draw(self, available: int) -> npt.NDArray[np.int64]:
        """Returns which of the users take part, ascending indices in [0, available)."""
        natural = isinstance(self.partitioner, ByUser)
        count = self.num_clients if self.num_users is None and natural else self.num_users
        if count is None:
            return np.arange(available)
        if count > available:
            option = "--data.num_clients" if self.num_users is None else "--data.num_users"
            raise FederatedError(
                f"Expected `{option}` to be at most {available}, the number of users in the training data, got {count}."
            )
        return np.sort(np.random.default_rng(self.draw_seed).permutation(available)[:count])
