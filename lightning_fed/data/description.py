"""What a data module tells of its data and of their division, and what a model takes from it."""

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from lightning.pytorch import LightningDataModule

from lightning_fed.data.division import Division
from lightning_fed.data.inspection import input_shape
from lightning_fed.data.label_statistics import label_statistics
from lightning_fed.data.loading import LoadedData
from lightning_fed.data.skews import FeatureSkew
from lightning_fed.data.skews.views import SkewedSets
from lightning_fed.data.split import Split

__all__ = ["DescribedData", "Divided"]


@dataclass
class Divided:
    """How the training set is divided under one seed, and what it then looks like."""

    division: Division
    skewed: SkewedSets | None
    hash: str | None = None


class DescribedData(LightningDataModule, ABC):
    """Describes the data that a subclass loads and divides.

    Attributes:
        skew: What samples look like depending on the client, None if they look as they are.
    """

    skew: FeatureSkew | None

    @abstractmethod
    def _load(self) -> LoadedData:
        """Returns the data, loaded once."""

    @abstractmethod
    def identity(self) -> list[str]:
        """Says what the clients are beyond the numbers of their rows, for ``split_hash``."""

    @abstractmethod
    def _divide(self) -> Divided:
        """Returns the division under the present seed, made once."""

    @property
    def num_classes(self) -> int | None:
        """Number of class names, else the largest label + 1; None when the targets are not class labels."""
        num_classes = self._load().num_classes
        return num_classes if self.skew is None else self.skew.num_classes(num_classes)

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes in the order of their labels, None when there are none."""
        names = self._load().datasets.class_names
        names = names if self.skew is None else self.skew.class_names(names)
        return None if names is None else tuple(names)

    @property
    def mean(self) -> tuple[float, ...] | None:
        """What was subtracted from each channel of the inputs, in [0, 1], None when nothing was."""
        mean = self._load().datasets.mean
        mean = mean if self.skew is None else self.skew.per_channel(mean)
        return None if mean is None else tuple(mean)

    @property
    def std(self) -> tuple[float, ...] | None:
        """What each channel was divided by after that, None when by nothing."""
        std = self._load().datasets.std
        std = std if self.skew is None else self.skew.per_channel(std)
        return None if std is None else tuple(std)

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        """Shape of one input (the first part of a sample), None when it has none."""
        shape = input_shape(self._load().datasets.train)
        return shape if self.skew is None else self.skew.input_shape(shape)

    @property
    def labels(self) -> npt.NDArray[Any] | None:
        """The training labels that the model sees, shape (samples,), None when the targets are not class labels."""
        labels, skewed = self._load().labels, self._divide().skewed
        return labels if labels is None or skewed is None else skewed.labels(labels)

    @property
    def memory(self) -> int | None:
        """Bytes of the training tensors, and of the text that windows are gathered from; None when there are none."""
        return self._load().memory

    @property
    def division(self) -> Division:
        """What each client trains on and what is held out."""
        return self._divide().division

    @property
    def split(self) -> Split:
        """Which training samples each client trains on."""
        return self.division.split

    @property
    def split_hash(self) -> str:
        """SHA-256 in hexadecimal that names the clients.

        Equal hashes mean data of the same class, size and targets, and equal splits, held-out sets, drawn users and
        feature skews. Inputs are not read for it, nor does it matter where they lie and how they are kept.
        """
        divided = self._divide()
        if divided.hash is None:  # asked for with every checkpoint
            parts = [divided.division.hash(), *self.identity()]
            divided.hash = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        return divided.hash

    def class_counts(self) -> npt.NDArray[np.int64] | None:
        """Returns the samples of each client and class, shape (clients, classes); None without class labels."""
        labels, num_classes = self.labels, self.num_classes
        return None if labels is None or num_classes is None else self.split.class_counts(labels, num_classes)

    def split_summary(self) -> dict[str, int | float | str]:
        """Describes the split in a few numbers, and how differently labels are distributed over the clients."""
        labels, num_classes = self.labels, self.num_classes
        summary = self.split.summary(labels) | {"hash": self.split_hash}
        if labels is None or num_classes is None:
            return summary
        return summary | label_statistics(self.split, labels, num_classes)
