"""The bases of data modules that bring their own data: any, images from files, and samples that belong to users."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.inspection import AnyDataset
from lightning_fed.data.loading import Datasets
from lightning_fed.data.partitioners import ByUser, Partitioner
from lightning_fed.data.readers.files import Normalisation, Storage, data_folder, fetch_whole, found_none, image_dataset
from lightning_fed.data.readers.leaf import UserSamples, known_and_unseen
from lightning_fed.errors import FederatedError, expect_choice, expect_count

__all__ = ["BundledDataModule", "ImageDataModule", "UserDataModule"]


class BundledDataModule(FederatedDataModule, ABC):
    """Base of data modules that bring their own data sets: a subclass writes ``load_datasets``.

    Args:
        **kwargs: Every option of ``FederatedDataModule`` except the data sets, the targets, the users and the source.
    """

    def __init__(self, **kwargs: Any) -> None:
        known = signature(FederatedDataModule.__init__).parameters
        for name in kwargs.keys() - known:
            raise FederatedError(f"Expected only options that {type(self).__name__} has, got `{name}`: leave it out.")
        super().__init__(
            None, val_dataset=None, test_dataset=None, predict_dataset=None, targets=None, users=None,
            source=None, **kwargs,
        )  # fmt: skip

    @abstractmethod
    def load_datasets(self) -> Datasets:
        """Returns the data sets; called once. Downloads belong in ``prepare_data``."""


class ImageDataModule(BundledDataModule, ABC):
    """Base of image sets that are read from files below a folder of data sets, which may be read-only.

    A subclass says where its files lie and reads them as bytes; inputs are (x / 255 - mean) / std.

    Args:
        root: Folder of data sets; the environment variable ``LIGHTNING_FED_DATA`` if not given.
        download: Whether to fetch missing files into ``root`` (needs a network).
        storage: How images are kept in memory: ``float32``, normalised once; ``uint8``, in a quarter of the memory,
            normalised batch by batch with the same result; ``auto``: ``uint8`` if floats would take more than 1 GiB.
        **kwargs: Every other option of ``BundledDataModule``.

    Attributes:
        folder: Where the files lie below ``root``.
        pixel_mean: Mean of the training images, in [0, 1], one value for each channel.
        pixel_std: Their standard deviation.
        advice: What to do about a bad file; the end of error messages.
    """

    folder: ClassVar[str]
    pixel_mean: tuple[float, ...]
    pixel_std: tuple[float, ...]
    advice: ClassVar[str] = "delete it and set `--data.download true` to fetch it again"

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        download: bool = False,
        storage: Storage = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        expect_choice("--data.storage", storage, get_args(Storage))
        self.root, self.download, self.storage = root, download, storage

    @abstractmethod
    def read(self, train: bool) -> tuple[Tensor, Tensor]:
        """Reads the training or the test part.

        Returns:
            Images, uint8 of shape (N, C, H, W), and labels, int64 of shape (N,).
        """

    @abstractmethod
    def names(self) -> Sequence[str]:
        """Returns the names of the classes; called after ``read``."""

    @abstractmethod
    def is_complete(self) -> bool:
        """Whether all files are there, so that nothing need be fetched."""

    @abstractmethod
    def fetch(self, root: Path) -> None:
        """Downloads into ``root``, a temporary folder of data sets, and checks the files."""

    def prepare_data(self) -> None:
        """Fetches the files if ``download`` is set and one is missing; an interrupted download leaves none."""
        if self.download and not self.is_complete():
            fetch_whole(self.data_root, self.folder, self.fetch)

    def load_datasets(self) -> Datasets:
        normalisation = Normalisation(self.pixel_mean, self.pixel_std)
        train, test = (image_dataset(*self.read(part), normalisation, self.storage) for part in (True, False))
        names = tuple(self.names())
        return Datasets(train, test=test, class_names=names, mean=self.pixel_mean, std=self.pixel_std)

    @property
    def data_root(self) -> Path:
        """The folder of data sets."""
        root = data_folder(self.root)
        if root is None:
            raise FederatedError(
                "Expected `--data.root` (or the environment variable LIGHTNING_FED_DATA) to name the folder that "
                f"holds {self.folder}, got neither."
            )
        return root

    @property
    def place(self) -> Path:
        """The folder of this data set's files."""
        return self.data_root / self.folder

    def missing(self, path: Path, or_else: str = "") -> FederatedError:
        """Makes the error for a file that is not there."""
        return FederatedError(
            f"Expected the file {path}{or_else}, found none: set `--data.root` to the folder that holds {self.folder}, "
            "or set `--data.download true` to fetch it."
        )


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
        self.path, self.root = path, root
        self.num_users, self.draw_seed = num_users, draw_seed

    @property
    def place(self) -> Path:
        """The folder or file."""
        place = (data_folder(self.root) or Path()) / Path(self.path).expanduser()
        if not place.exists():
            raise found_none("the file or folder", place, "--data.path")
        return place

    def identity(self) -> list[str]:
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

    def of_users(
        self, train: UserSamples, test: UserSamples | None, make: Callable[[UserSamples], AnyDataset], **facts: Any
    ) -> Datasets:
        """Returns the samples of the drawn users, each set made by ``make``; ``facts`` are options of ``Datasets``."""
        chosen = train.of(self.draw(len(train.names)))
        tests: dict[str, Any] = {}
        if test is not None:
            rows, places, others = known_and_unseen(test.names, train.names, chosen.names)
            known = test.of(rows)
            tests = self.test_sets(make(known), make(test.of(others)), places[known.users])
        return Datasets(make(chosen), **tests, users=chosen.users, user_names=chosen.names, **facts)

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
