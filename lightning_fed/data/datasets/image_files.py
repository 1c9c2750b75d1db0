"""The base of data modules that read images from files."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, get_args

from torch import Tensor

from lightning_fed.data.datasets.bundled import BundledDataModule
from lightning_fed.data.loading import Datasets
from lightning_fed.data.readers.downloads import data_folder, fetch_whole
from lightning_fed.data.readers.images import Normalisation, Storage, image_dataset
from lightning_fed.errors import FederatedError, expect_choice

__all__ = ["ImageDataModule"]


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
        self.root = root
        self.download = download
        self.storage = storage

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
        """Reads both parts."""
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
