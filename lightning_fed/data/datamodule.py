"""The data module of a federated run: any data set, split over clients."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Subset

from lightning_fed.data.checks import check_count, check_fraction
from lightning_fed.data.inspection import AnyDataset, input_shape
from lightning_fed.data.loading import Datasets, EvalLoaders, LoadedData, eval_loaders, worker_options
from lightning_fed.data.partitioners import IID, Partitioner
from lightning_fed.data.sources import BatchSource, LoaderSource, TensorSource
from lightning_fed.data.split import Split
from lightning_fed.errors import FederatedError
from lightning_fed.seeding import Purpose, numpy_generator_for, run_seed

__all__ = ["BundledDataModule", "FederatedDataModule"]


@dataclass(frozen=True)
class _Division:
    """How the training set is divided under one seed."""

    seed: int
    held_out: npt.NDArray[np.int64]
    split: Split


class FederatedDataModule(LightningDataModule):
    """Splits a map-style data set over clients; validation and test sets stay central.

    A data set with an attribute ``tensors`` (a ``TensorDataset``, or a tuple or dict of tensors whose row i is sample
    i) is read straight from memory on the device; any other goes through one data loader, with the same batches in
    the same order. Nothing is loaded before it is needed.

    Args:
        train_dataset: Training samples of all clients together.
        partitioner: How the samples are split over the clients.
        num_clients: Number of clients.
        batch_size: Samples per local training batch.
        eval_batch_size: Samples per batch in validation, test and prediction.
        val_dataset: Central validation set.
        test_dataset: Central test set, or several by name.
        predict_dataset: What predictions are made for; the test set if not given.
        val_fraction: Share of ``train_dataset`` held out, before the split, as central validation set; in [0, 1).
        split_seed: Seed of the split and of the held-out share; the run's seed if not given.
        targets: One target per training sample; found in ``train_dataset`` if not given.
        in_memory: Whether data that is in memory as tensors is read without a data loader.
        num_workers: Worker processes of a data loader.
    """

    def __init__(
        self,
        train_dataset: AnyDataset | None,
        partitioner: Partitioner = IID(),  # noqa: B008 - holds no state
        num_clients: int = 10,
        batch_size: int = 32,
        eval_batch_size: int = 512,
        val_dataset: AnyDataset | None = None,
        test_dataset: AnyDataset | dict[str, AnyDataset] | None = None,
        predict_dataset: AnyDataset | None = None,
        val_fraction: float = 0.0,
        split_seed: int | None = None,
        targets: Any = None,
        in_memory: bool = True,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        check_count("--data.num_clients", num_clients)
        check_count("--data.batch_size", batch_size)
        check_count("--data.eval_batch_size", eval_batch_size)
        check_count("--data.num_workers", num_workers, minimum=0)
        check_fraction("--data.val_fraction", val_fraction)
        if split_seed is not None:
            check_count("--data.split_seed", split_seed, minimum=0)
        self.partitioner = partitioner
        self.num_clients = num_clients
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.val_fraction = val_fraction
        self.split_seed = split_seed
        self.in_memory = in_memory
        self.num_workers = num_workers
        self._given = (train_dataset, val_dataset, test_dataset, predict_dataset, targets)
        self._loaded: LoadedData | None = None
        self._division: _Division | None = None

    def load_datasets(self) -> Datasets:
        """Returns the data sets; override it (or subclass ``BundledDataModule``) to bring your own.

        Raises:
            FederatedError: If no training set was given.
        """
        train, *others = self._given
        if train is None:
            raise FederatedError(
                "Expected `--data.train_dataset` to be a data set, got none: give one, or choose a data module that "
                "brings its data, such as `--data Digits`."
            )
        return Datasets(train, *others)

    def setup(self, stage: str | None = None) -> None:
        """Loads the data and builds the split; calling it again changes nothing while the seed stays the same."""
        self._divide()

    @property
    def num_classes(self) -> int | None:
        """Largest class label + 1, None when the targets are not class labels."""
        labels = self._load().labels
        return None if labels is None else int(labels.max()) + 1

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        """Shape of one input (the first part of a sample), None when it has none."""
        return input_shape(self._load().datasets.train)

    @property
    def split(self) -> Split:
        """Which training samples each client owns."""
        return self._divide().split

    @property
    def split_hash(self) -> str:
        """SHA-256 of the split, in hexadecimal: equal hashes mean equal splits."""
        return self.split.hash()

    def class_counts(self) -> npt.NDArray[np.int64] | None:
        """Returns the samples of each client and class, shape (clients, classes); None without class labels."""
        labels, num_classes = self._load().labels, self.num_classes
        return None if labels is None or num_classes is None else self.split.class_counts(labels, num_classes)

    def split_summary(self) -> dict[str, int | float | str]:
        """Describes the split in a few numbers."""
        return self.split.summary(self._load().labels)

    def train_source(self) -> BatchSource:
        """Returns where the local loop gets the clients' batches from."""
        loaded = self._load()
        if loaded.tensors is not None:
            return TensorSource(loaded.tensors, self.split, self.batch_size)
        return LoaderSource(loaded.datasets.train, self.split, self.batch_size, self.num_workers)

    def train_dataloader(self) -> DataLoader[Any]:
        """Returns the training data of all clients together, shuffled, for a centralised baseline."""
        pooled = Subset(self._load().datasets.train, np.sort(self.split.index).tolist())
        return DataLoader(pooled, self.batch_size, shuffle=True, **worker_options(self.num_workers))

    def val_dataloader(self) -> EvalLoaders:
        """Returns the batches of the central validation set, an empty list when there is none."""
        datasets, held_out = self._load().datasets, self._divide().held_out
        return self._eval_loaders(Subset(datasets.train, held_out.tolist()) if len(held_out) else datasets.val)

    def test_dataloader(self) -> EvalLoaders:
        """Returns the batches of the test set, by name if there are several, an empty list when there is none."""
        return self._eval_loaders(self._load().datasets.test)

    def predict_dataloader(self) -> EvalLoaders:
        """Returns the batches to predict, those of the test set unless a set of its own was given."""
        datasets = self._load().datasets
        return self._eval_loaders(datasets.test if datasets.predict is None else datasets.predict)

    def _load(self) -> LoadedData:
        if self._loaded is None:
            # Also reached without a trainer, which would have called it; it must be cheap when there is nothing to do.
            self.prepare_data()
            datasets = self.load_datasets()
            if datasets.val is not None and self.val_fraction > 0:
                raise FederatedError(
                    f"Expected either `--data.val_dataset` or `--data.val_fraction`, got both ({self.val_fraction}): "
                    "set `--data.val_fraction 0` to keep the validation set."
                )
            self._loaded = LoadedData.of(datasets, self.in_memory)
        return self._loaded

    def _seed(self) -> int:
        if self.split_seed is not None:
            return self.split_seed
        # Lightning's own Trainer has no seed.
        seed = getattr(self.trainer, "seed", None)
        return run_seed() if seed is None else int(seed)

    def _divide(self) -> _Division:
        loaded, seed = self._load(), self._seed()
        if self._division is None or self._division.seed != seed:
            rows, held_out = self._hold_out(loaded.num_samples, seed)
            split = Split.by(self.partitioner, loaded.targets, rows, self.num_clients, seed)
            self._division = _Division(seed, held_out, split)
        return self._division

    def _hold_out(self, num_samples: int, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        count = max(1, round(self.val_fraction * num_samples)) if self.val_fraction > 0 else 0
        # A stream of its own, apart from the partitioner's, which is (seed, SPLIT, 0, 0).
        shuffled = numpy_generator_for(seed, Purpose.SPLIT, round=1).permutation(num_samples)
        return np.sort(shuffled[count:]), np.sort(shuffled[:count])

    def _eval_loaders(self, dataset: AnyDataset | dict[str, AnyDataset] | None) -> EvalLoaders:
        return eval_loaders(dataset, self.eval_batch_size, self.in_memory, self.num_workers)


class BundledDataModule(FederatedDataModule, ABC):
    """Base of data modules that bring their own data sets: a subclass writes ``load_datasets``.

    Args:
        **kwargs: Every option of ``FederatedDataModule`` except the data sets and the targets.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            train_dataset=None, val_dataset=None, test_dataset=None, predict_dataset=None, targets=None, **kwargs
        )

    @abstractmethod
    def load_datasets(self) -> Datasets:
        """Returns the data sets, called once; what must be fetched first belongs in ``prepare_data``."""
