"""Skewed views of what a data module has: the clients' batches, central sets, and all training data together."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from typing_extensions import Self

from lightning_fed.data.inspection import AnyDataset, find_targets, first_input, length
from lightning_fed.data.skews.base import FeatureSkew
from lightning_fed.data.skews.facts import DataFacts
from lightning_fed.data.sources import BatchSource, EvalBatches
from lightning_fed.data.split import Split

if TYPE_CHECKING:
    from lightning_fed.data.division import Division, HeldOut
    from lightning_fed.data.loading import EvalLoader, LoadedData

__all__ = ["NEW_SCHEME", "NumberedRows", "SEEN_SCHEMES", "SkewedBatches", "SkewedRows", "SkewedSets", "SkewedSource"]

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
        """Skews a batch.

        Args:
            batch: The samples of some rows, on the same device.
            rows: The rows, int64 of shape (B,), or a slice of them.
            scheme: Another scheme than the rows'.
        """
        schemes = self._schemes if scheme is None else scheme
        chosen = schemes if isinstance(schemes, int) else _take(schemes, rows)
        return self._skew.apply(batch, chosen, _take(self._draws, rows))


class SkewedSource:
    """Clients' batches, each in the client's scheme; computed where the batches are.

    Args:
        source: The clients' batches.
        split: Which rows each client owns.
        rows: The training set's rows.
    """

    def __init__(self, source: BatchSource, split: Split, rows: SkewedRows) -> None:
        self.sizes = source.sizes
        self.batch_size = source.batch_size
        self.reads_are_seeded = source.reads_are_seeded
        self._source = source
        self._rows = rows
        self._index = torch.from_numpy(split.index)
        self._offsets = split.offsets

    def to(self, device: torch.device | str) -> Self:
        """Makes the batches live on a device; returns itself."""
        self._source, self._rows, self._index = self._source.to(device), self._rows.to(device), self._index.to(device)
        return self

    def batches(self, client: int, order: Tensor, seed: int, batch_size: int | None = None) -> Iterator[Any]:
        """Yields the source's batches in the client's scheme."""
        own = self._index[int(self._offsets[client]) : int(self._offsets[client + 1])]
        own, size = own.index_select(0, order.to(own.device)), batch_size or self.batch_size
        # A user's own source need not know of other sizes than its own.
        other = {} if batch_size is None else {"batch_size": batch_size}
        for number, batch in enumerate(self._source.batches(client, order, seed, **other)):
            yield self._rows.show(batch, own[number * size : (number + 1) * size], scheme=client)


class SkewedBatches:
    """The batches of a central set under a skew, computed where they are; several views may share the batches.

    Args:
        loader: Consecutive batches of ``batch_size`` samples.
        rows: The set's rows.
    """

    def __init__(self, loader: EvalBatches | DataLoader[Any], rows: SkewedRows) -> None:
        assert loader.batch_size is not None
        self.batch_size = loader.batch_size
        self._loader = loader
        self._rows = rows
        self._device: torch.device | None = None

    @property
    def num_samples(self) -> int:
        """Samples in the set."""
        loader = self._loader
        return loader.num_samples if isinstance(loader, EvalBatches) else length(loader.dataset, "--data")

    def __len__(self) -> int:
        """Number of batches."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yields lists of tensors, or dicts."""
        for number, batch in enumerate(self._loader):
            rows = slice(number * self.batch_size, (number + 1) * self.batch_size)
            yield self._rows.show(move_data_to_device(batch, self._device) if self._device else batch, rows)

    def to(self, device: torch.device | str) -> Self:
        """Makes batches arrive on a device; returns itself."""
        self._rows.to(device)
        if isinstance(self._loader, EvalBatches):
            self._loader.to(device)
        else:
            self._device = torch.device(device)
        return self


class SkewedSets:
    """Shows every data set of a data module under a skew.

    Args:
        skew: A prepared skew.
        split: Which training samples each client owns.
        targets: One target per training sample, None if they are unknown.
        num_samples: Training samples.
        owners: The client of each training sample, negative for none, shape (num_samples,); those of ``split`` if not
            given.
    """

    def __init__(
        self,
        skew: FeatureSkew,
        split: Split,
        targets: npt.NDArray[Any] | None,
        num_samples: int,
        owners: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.skew = skew
        self._split = split
        self._targets = targets
        self._num_samples = num_samples
        if owners is None:
            owners = np.full(num_samples, -1, dtype=np.int64)
            owners[split.index] = split.owners
        self._owners = np.where(owners < 0, skew.num_clients, owners)

    @classmethod
    def of(cls, skew: FeatureSkew, loaded: "LoadedData", division: "Division") -> "SkewedSets":
        """Prepares a skew for the data that were loaded; clients that do not train have schemes of their own.

        Raises:
            FederatedError: If the skew is not made for such data.
        """
        sample, datasets = first_input(loaded.datasets.train), loaded.datasets
        facts = DataFacts(
            sample if isinstance(sample, Tensor) else None,
            loaded.num_classes,
            tuple(datasets.mean or (0.0,)),
            tuple(datasets.std or (1.0,)),
        )
        prepared = skew.prepare(division.num_owners, division.seed, facts)
        owners = division.owners(loaded.num_samples)
        return cls(prepared, division.split, loaded.targets, loaded.num_samples, owners)

    def source(self, source: BatchSource) -> SkewedSource:
        """Returns the clients' batches."""
        return SkewedSource(source, self._split, self._training_rows())

    def labels(self, labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns the training labels that the model sees, shape (num_samples,)."""
        draws = self.skew.draws("train", self._num_samples)
        return self.skew.labels(torch.from_numpy(np.asarray(labels, dtype=np.int64)), draws).numpy()

    def collate(self) -> Callable[[list[Any]], Any]:
        """Returns the ``collate_fn`` that shows samples of ``NumberedRows`` in the schemes of their owners."""
        return _Collate(self._training_rows())

    def loaders(
        self, stage: str, dataset: AnyDataset | dict[str, AnyDataset], load: Callable[[AnyDataset], Any]
    ) -> "EvalLoader | dict[str, EvalLoader]":
        """Returns what evaluation sees of one data set or of several by name.

        Args:
            stage: ``val``, seen in the clients' schemes; ``test``, seen in those and in the new one, as two sets;
                ``predict``, seen in the new one.
            dataset: What is evaluated.
            load: Makes batches of a data set.
        """
        if stage == "test":
            return self.both(dataset, load)
        view = self.seen if stage == "val" else self.new
        if isinstance(dataset, dict):
            return {name: view(f"{stage}/{name}", part, load(part)) for name, part in dataset.items()}
        return view(stage, dataset, load(dataset))

    def seen(
        self,
        name: str,
        dataset: AnyDataset,
        loader: EvalBatches | DataLoader[Any],
        targets: npt.NDArray[Any] | None = None,
    ) -> SkewedBatches:
        """Returns a central set in the clients' schemes, spread as their training samples of the same class are.

        Args:
            name: Name of the set.
            dataset: The set.
            loader: Its batches.
            targets: Its targets, shape (samples,); found in it if not given.
        """
        size = length(dataset, "--data.test_dataset")
        targets = find_targets(dataset) if targets is None else targets
        held = self._split.index
        schemes = self.skew.clients(
            name,
            size if targets is None else targets,
            self._split.owners,
            None if self._targets is None else self._targets[held],
        )
        return SkewedBatches(loader, SkewedRows(self.skew, self.skew.draws(name, size), schemes))

    def new(self, name: str, dataset: AnyDataset, loader: EvalBatches | DataLoader[Any]) -> SkewedBatches:
        """Returns a central set in the scheme that no client has."""
        draws = self.skew.draws(name, length(dataset, "--data.test_dataset"))
        return SkewedBatches(loader, SkewedRows(self.skew, draws, self.skew.num_clients))

    def held_out(self, part: "HeldOut", loader: EvalBatches | DataLoader[Any]) -> SkewedBatches:
        """Returns samples that were held out of the training set, each in the scheme of the client that it belongs to.

        Args:
            part: Which samples.
            loader: Their batches, in the same order.
        """
        draws = self.skew.draws("train", self._num_samples)[torch.from_numpy(part.rows)]
        return SkewedBatches(loader, SkewedRows(self.skew, draws, self._owners[part.rows]))

    def both(
        self, datasets: AnyDataset | dict[str, AnyDataset], load: Callable[[AnyDataset], Any]
    ) -> "dict[str, EvalLoader]":
        """Returns each test set twice, in the clients' schemes and in the new one.

        Args:
            datasets: A test set, or several by name.
            load: Makes batches of one.

        Returns:
            ``seen_schemes`` and ``new_scheme``, behind the set's name and a slash where there are several.
        """
        views: dict[str, EvalLoader] = {}
        named = datasets if isinstance(datasets, dict) else {"": datasets}
        for name, dataset in named.items():
            loader, prefix, stream = load(dataset), f"{name}/" if name else "", f"test/{name}" if name else "test"
            views[prefix + SEEN_SCHEMES] = self.seen(stream, dataset, loader)
            views[prefix + NEW_SCHEME] = self.new(stream, dataset, loader)
        return views

    def _training_rows(self) -> SkewedRows:
        return SkewedRows(self.skew, self.skew.draws("train", self._num_samples), self._owners)


class NumberedRows(Dataset[Any]):
    """A data set whose samples come with their row numbers.

    Args:
        dataset: A map-style data set.
    """

    def __init__(self, dataset: AnyDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        """Number of samples."""
        return length(self.dataset, "--data.train_dataset")

    def __getitem__(self, row: int) -> tuple[int, Any]:
        """Returns the row and its sample."""
        return row, self.dataset[row]


class _Collate:
    """Makes a skewed batch of numbered samples, in a worker or in the main process."""

    def __init__(self, rows: SkewedRows) -> None:
        self.rows = rows

    def __call__(self, samples: list[Any]) -> Any:
        numbers, parts = zip(*samples, strict=True)
        return self.rows.show(default_collate(list(parts)), torch.tensor(numbers))


def _take(values: Tensor, rows: Tensor | slice) -> Tensor:
    return values[rows] if isinstance(rows, slice) else values.index_select(0, rows)
