"""Skewed views of what a data module has: the clients' batches, central sets, and all training data together."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import StackDataset
from typing_extensions import Self

from lightning_fed.data.collation import CheckedCollate, Collate
from lightning_fed.data.holdout import CENTRAL, Division, HeldOut
from lightning_fed.data.evaluation import JoinedBatches
from lightning_fed.data.inspection import AnyDataset, find_targets, first_input, length
from lightning_fed.data.loading import LoadedData
from lightning_fed.data.skews.base import DataFacts, FeatureSkew
from lightning_fed.data.sources import BatchSource, EvalLoader, SetBatches, WrappedSource
from lightning_fed.data.split import Split

__all__ = ["NEW_SCHEME", "SEEN_SCHEMES", "SkewedBatches", "SkewedRows", "SkewedSets", "SkewedSource", "numbered_rows"]

SEEN_SCHEMES, NEW_SCHEME = "seen_schemes", "new_scheme"


class SkewedRows:
    """What is fixed for each row of one data set: its scheme, and the numbers that a skew draws for it.

    Args:
        skew: A prepared skew.
        draws: The rows' numbers, shape (samples, num_draws).
        schemes: The scheme of all rows, or one for each, shape (samples,).
    """

    def __init__(self, skew: FeatureSkew, draws: Tensor, schemes: int | npt.NDArray[np.int64]) -> None:
        self._skew = skew
        self._draws = draws
        self._schemes = schemes if isinstance(schemes, int) else torch.from_numpy(schemes)

    def to(self, device: torch.device | str) -> Self:
        """Moves what is needed to a device; returns itself."""
        self._skew, self._draws = self._skew.on(device), self._draws.to(device)
        if isinstance(self._schemes, Tensor):
            self._schemes = self._schemes.to(device)
        return self

    def show(self, batch: Any, rows: Tensor | slice, scheme: int | None = None) -> Any:
        """Skews a batch of some rows, int64 of shape (B,) or a slice, in their schemes or in another one."""
        schemes = self._schemes if scheme is None else scheme
        chosen = schemes if isinstance(schemes, int) else _take(schemes, rows)
        return self._skew.apply(batch, chosen, _take(self._draws, rows))


class SkewedSource(WrappedSource):
    """Clients' batches, each in the client's scheme; computed on the device of the batches."""

    def __init__(self, source: BatchSource, split: Split, rows: SkewedRows) -> None:
        super().__init__(source)
        self._rows = rows
        self._index = torch.from_numpy(split.index)
        self._offsets = split.offsets

    def to(self, device: torch.device | str) -> Self:
        """Makes the batches live on a device; returns itself."""
        self._rows, self._index = self._rows.to(device), self._index.to(device)
        return super().to(device)

    def batches(self, client: int, order: Tensor, seed: int, batch_size: int | None = None) -> Iterator[Any]:
        """Yields the source's batches in the client's scheme."""
        own = self._index[int(self._offsets[client]) : int(self._offsets[client + 1])]
        own, size = own.index_select(0, order.to(own.device)), batch_size or self.batch_size
        for number, batch in enumerate(self.read(client, order, seed, batch_size)):
            yield self._rows.show(batch, own[number * size : (number + 1) * size], scheme=client)

    def gather(self, rows: Tensor, *drawn: Tensor) -> Any:
        """Gathers samples of several clients at once, each in its owner's scheme; see ``TensorSource``."""
        inner: Any = self.inner
        return self._rows.show(inner.gather(rows, *drawn), self._index.index_select(0, rows))


class SkewedBatches(JoinedBatches):
    """The skewed batches of a central set, computed on their device; several views may share the batches."""

    def __init__(self, loader: SetBatches, rows: SkewedRows) -> None:
        super().__init__([loader])
        assert loader.batch_size is not None
        self.batch_size = loader.batch_size
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        """Yields lists of tensors, or dicts."""
        for number, batch in enumerate(super().__iter__()):
            yield self._rows.show(batch, slice(number * self.batch_size, (number + 1) * self.batch_size))

    def to(self, device: torch.device | str) -> Self:
        """Makes batches arrive on a device; returns itself."""
        self._rows.to(device)
        return super().to(device)


@dataclass(frozen=True)
class SkewedSets:
    """Shows every data set of a data module under a skew.

    Attributes:
        skew: A prepared skew, with schemes for the clients that do not train, too.
        loaded: The data sets.
        division: What the clients hold.
    """

    skew: FeatureSkew
    loaded: LoadedData
    division: Division

    @classmethod
    def of(cls, skew: FeatureSkew, loaded: LoadedData, division: Division) -> "SkewedSets":
        """Prepares a skew for the data that were loaded."""
        sample, datasets = first_input(loaded.datasets.train), loaded.datasets
        facts = DataFacts(
            sample if isinstance(sample, Tensor) else None,
            loaded.num_classes,
            tuple(datasets.mean or (0.0,)),
            tuple(datasets.std or (1.0,)),
        )
        return cls(skew.prepare(division.num_owners, division.seed, facts), loaded, division)

    def source(self, source: BatchSource, split: Split) -> SkewedSource:
        """Returns the clients' skewed batches for a split of the training set."""
        return SkewedSource(source, split, self._training_rows())

    def labels(self, labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns the training labels that the model sees, shape (num_samples,)."""
        targets = torch.from_numpy(np.asarray(labels, dtype=np.int64))
        return self.skew.labels(targets, self.skew.draws("train", len(labels))).numpy()

    def collate(self, collate: Collate | None) -> Collate:
        """Returns a ``collate_fn`` that shows samples of ``numbered_rows`` in the schemes of their owners."""
        return partial(_collate, self._training_rows(), CheckedCollate(collate))

    def loaders(
        self, stage: str, dataset: AnyDataset | dict[str, AnyDataset], load: Callable[[AnyDataset], Any]
    ) -> EvalLoader | dict[str, EvalLoader]:
        """Returns the skewed batches of one evaluation set, or of several by name.

        Args:
            stage: ``val`` uses the clients' schemes, ``predict`` the new one. ``test`` makes two sets, one with the
                clients' schemes and one with the new one; their names follow that of the data set.
            dataset: What is evaluated.
            load: Makes batches of a data set.
        """
        views: dict[str, list[tuple[str, Callable[..., SkewedBatches]]]] = {
            "val": [("", self.seen)],
            "test": [(SEEN_SCHEMES, self.seen), (NEW_SCHEME, self.new)],
            "predict": [("", self.new)],
        }
        found: dict[str, EvalLoader] = {}
        for name, part in (dataset if isinstance(dataset, dict) else {"": dataset}).items():
            loader, stream = load(part), f"{stage}/{name}" if name else stage
            for view, show in views[stage]:
                found["/".join(filter(None, (name, view)))] = show(stream, part, loader)
        return found if isinstance(dataset, dict) or stage == "test" else found[""]

    def seen(
        self, name: str, dataset: AnyDataset, loader: SetBatches, targets: npt.NDArray[Any] | None = None
    ) -> SkewedBatches:
        """Returns a central set in the clients' schemes, with each class spread as in their training samples.

        Its targets, shape (samples,), are found in it if not given.
        """
        size, split, owned = length(dataset, "--data.test_dataset"), self.division.split, self.loaded.targets
        targets = find_targets(dataset) if targets is None else targets
        schemes = self.skew.clients(
            name, size if targets is None else targets, split.owners, None if owned is None else owned[split.index]
        )
        return self.shown(loader, self.skew.draws(name, size), schemes)

    def new(self, name: str, dataset: AnyDataset, loader: SetBatches) -> SkewedBatches:
        """Returns a central set in the scheme that no client has."""
        draws = self.skew.draws(name, length(dataset, "--data.test_dataset"))
        return self.shown(loader, draws, self.skew.num_clients)

    def held_out(self, name: str, size: int, part: HeldOut, loader: SetBatches) -> SkewedBatches:
        """Returns some rows of a set with ``size`` samples, each in the scheme of its client."""
        draws = self.skew.draws(name, size)[torch.from_numpy(part.rows)]
        return self.shown(loader, draws, self._schemes(part.owners))

    def shown(self, loader: SetBatches, draws: Tensor, schemes: int | npt.NDArray[np.int64]) -> SkewedBatches:
        """Returns skewed batches, given the numbers and schemes of their rows; see ``SkewedRows``."""
        return SkewedBatches(loader, SkewedRows(self.skew, draws, schemes))

    def _schemes(self, owners: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns the scheme of each sample; the new one if no client owns it."""
        return np.where(owners == CENTRAL, self.skew.num_clients, owners)

    def _training_rows(self) -> SkewedRows:
        size = self.loaded.num_samples
        return SkewedRows(self.skew, self.skew.draws("train", size), self._schemes(self.division.owners(size)))


def numbered_rows(dataset: AnyDataset) -> StackDataset[Any]:
    """Returns a data set whose samples come with their row numbers."""
    rows: Any = range(length(dataset, "--data.train_dataset"))
    return StackDataset(rows, dataset)


def _collate(rows: SkewedRows, collate: Collate, samples: list[Any]) -> Any:
    """Makes a skewed batch of numbered samples, in a worker or in the main process."""
    numbers, parts = zip(*samples, strict=True)
    return rows.show(collate(list(parts)), torch.tensor(numbers))


def _take(values: Tensor, rows: Tensor | slice) -> Tensor:
    return values[rows] if isinstance(rows, slice) else values.index_select(0, rows)
