"""The data module of a federated run: any data set, split over clients."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lightning_fed.core import ShownInNotebooks
from lightning_fed.core.seeding import run_seed
from lightning_fed.core.user_code import TRANSFER_HOOKS, overrides
from lightning_fed.data.augmentation import Augmentation, AugmentedSource
from lightning_fed.data.batch_sources import BatchSource, EvalLoaders
from lightning_fed.data.client_data import ClientData, Part
from lightning_fed.data.collation import Collate, Loading
from lightning_fed.data.containers import DEFAULT_CLIENTS, ClientDatasets
from lightning_fed.data.holdout import Division, DivisionOptions, ValSplit
from lightning_fed.data.inspection import AnyDataset
from lightning_fed.data.loading import Datasets, LoadedData
from lightning_fed.data.partitioners import IID, ByUser, Partitioner
from lightning_fed.data.skews import FeatureSkew
from lightning_fed.data.source_module import SourceModule, expect_source
from lightning_fed.data.split import Split, label_statistics
from lightning_fed.errors import FederatedError, expect, expect_count

__all__ = ["FederatedDataModule"]


class FederatedDataModule(LightningDataModule, ShownInNotebooks):
    """Splits a map-style data set over clients; validation and test sets stay central.

    A data set with an attribute ``tensors`` (a ``TensorDataset``, or a tuple or dict of tensors whose row i is sample
    i) is read straight from memory on the device; any other goes through one data loader, with the same batches in
    the same order. Nothing is loaded before it is needed.

    Args:
        train_dataset: Training samples of all clients together; leave it out with ``source``.
        partitioner: How the samples are split over the clients; ``IID`` if not given. By default training data that are
            ``ClientDatasets`` keep their clients.
        num_clients: Number of clients, including ``unseen_clients``; None for one client per user (``ByUser``).
        batch_size: Samples per local training batch; by default as in the source's training loader, else 32.
        eval_batch_size: Samples per batch in validation, test and prediction.
        val_dataset: Central validation set.
        test_dataset: Central test set, or several by name.
        predict_dataset: Samples to predict; the test sets if not given.
        val_fraction: Share of ``train_dataset`` held out as validation set; in [0, 1).
        split_seed: Seed of the split, the held-out sets and the skew; the run's seed if not given.
        targets: One target per training sample; found in ``train_dataset`` if not given.
        in_memory: Whether data held in memory as tensors is read without a data loader.
        num_workers: Worker processes of a data loader; by default as in the source's training loader, else none.
        augmentation: Random changes of the inputs of local training batches; none if not given.
        skew: Makes samples look different at each client; none if not given. Each test set then becomes two:
            ``seen_schemes`` (samples look as at the clients) and ``new_scheme`` (as at no client).
        users: The user of each training sample; found in ``train_dataset`` if not given.
        val_split: What ``val_fraction`` is a share of: ``central``, of all samples before the split (after it with
            ``ByUser`` or ``unseen_clients``), or ``per_client``, of the samples of each client.
        unseen_clients: How many clients (a number or a share) never train. Their samples are the test set ``unseen``,
            with the test samples of their users if the users are known.
        client_test_fraction: Share of each client's samples held out as test set ``clients``, rounded down; in [0, 1).
        collate_fn: Makes a batch from a list of samples; by default the source's, else torch's ``default_collate``.
        drop_last: Whether local training leaves out a client's last batch if it is short; clients with less than a
            whole batch are then skipped. By default as in the source's training loader, else false.
        source: A LightningDataModule without clients. The data set of its ``train_dataloader`` is split over the
            clients; its validation, test and predict loaders are used as they are.
        class_labels: Whether targets that are whole numbers from 0 are class labels: ``false`` for prices, counts and
            the like. By default they are, unless there would be more classes than samples, and than 10,000.
    """

    def __init__(
        self,
        train_dataset: AnyDataset | None = None,
        partitioner: Partitioner | None = None,
        num_clients: int | None = DEFAULT_CLIENTS,
        batch_size: int | None = None,
        eval_batch_size: int = 512,
        val_dataset: AnyDataset | None = None,
        test_dataset: AnyDataset | dict[str, AnyDataset] | None = None,
        predict_dataset: AnyDataset | None = None,
        val_fraction: float = 0.0,
        split_seed: int | None = None,
        targets: Any = None,
        in_memory: bool = True,
        num_workers: int | None = None,
        augmentation: Augmentation | None = None,
        skew: FeatureSkew | None = None,
        users: Any = None,
        val_split: ValSplit = "central",
        unseen_clients: int | float = 0,
        client_test_fraction: float = 0.0,
        collate_fn: Collate | None = None,
        drop_last: bool | None = None,
        source: LightningDataModule | None = None,
        class_labels: bool | None = None,
    ) -> None:
        super().__init__()
        expect_source(
            source, train_dataset=train_dataset, val_dataset=val_dataset, test_dataset=test_dataset,
            predict_dataset=predict_dataset, skew=skew,
        )  # fmt: skip
        expect_count("--data.eval_batch_size", eval_batch_size)
        self.partitioner = IID() if partitioner is None else partitioner
        self.num_clients, self.eval_batch_size = num_clients, eval_batch_size
        self.batch_size, self.num_workers = batch_size, num_workers
        self.collate_fn, self.drop_last, self._may_come_split = collate_fn, drop_last, partitioner is None
        self.held_out = DivisionOptions(val_fraction, val_split, unseen_clients, client_test_fraction)
        self.val_fraction, self.split_seed = val_fraction, split_seed
        for name, least in (("num_clients", 1), ("batch_size", 1), ("num_workers", 0), ("split_seed", 0)):
            expect_count(f"--data.{name}", getattr(self, name), least, optional=True)
        self.in_memory, self.augmentation, self.skew, self.source = in_memory, augmentation, skew, source
        self._given = (train_dataset, val_dataset, test_dataset, predict_dataset, targets, users)
        self._loaded: LoadedData | None = None
        self._clients: ClientData | None = None
        self._source_loading, self.targets_are_labels = Loading(), class_labels
        self._source = None if source is None else SourceModule(source, self._context, class_labels is not False)
        if self._source is None:  # otherwise None means the source's own value
            self.batch_size, self.num_workers = batch_size or Loading.batch_size, num_workers or 0
        else:
            self.prepare_data_per_node = self._source.module.prepare_data_per_node
            vars(self).update({hook: getattr(source, hook) for hook in TRANSFER_HOOKS if overrides(source, hook)})

    def load_datasets(self) -> Datasets:
        """Returns the data sets; override it (or subclass ``BundledDataModule``) to bring your own."""
        train, val, test, predict, targets, users = self._given
        if self._source is not None:
            train, self._source_loading = self._source.train_set()
        if train is None:
            raise FederatedError(
                "Expected `--data.train_dataset` to be a data set, got none: give one, or choose a data module that "
                "brings its data, such as `--data Digits`."
            )
        return Datasets(train, val, test, predict, targets, users=users)

    def prepare_data(self) -> None:
        """Lets the source, if there is one, prepare its data."""
        if self._source is not None:
            self._source.prepare()

    def setup(self, stage: str | None = None) -> None:
        """Loads the data and builds the split; calling it again changes nothing while the seed stays the same.

        A run that only evaluates does not load or split the training data of a source.
        """
        if self._source is not None and stage not in (None, "fit"):
            self._source.set_up(stage)
        else:
            self._client_data()

    def teardown(self, stage: str) -> None:
        """Tears the source down, and forgets the data that this may have removed."""
        if self._source is not None and self._source.tear_down(stage):
            self._loaded = self._clients = None

    def on_exception(self, exception: BaseException) -> None:
        if self.source is not None:
            self.source.on_exception(exception)

    def __getattr__(self, name: str) -> Any:
        """Looks up missing attributes in the source, such as a vocabulary that the model needs."""
        if name.startswith("_") or vars(self).get("source") is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.source, name)

    @property
    def split_by(self) -> str:
        """Name of what assigns samples to clients: the partitioner's class, or ``ClientDatasets``."""
        as_they_come = self._may_come_split and isinstance(self._load().datasets.train, ClientDatasets)
        return "ClientDatasets" if as_they_come else type(self.partitioner).__name__

    @property
    def loading(self) -> Loading:
        """How samples become batches: by the options, else as in the source's training loader."""
        given = {name: getattr(self, name) for name in ("batch_size", "num_workers", "collate_fn", "drop_last")}
        return self._source_loading.changed(**given)

    @property
    def _eval_loading(self) -> Loading:
        return self.loading.changed(batch_size=self.eval_batch_size, drop_last=False)

    def identity(self) -> list[str]:
        """Describes the clients beyond their row numbers, for ``split_hash``."""
        # Only the source counts if there is one: the class around it depends on how the data were given.
        parts = (self, self._given[0]) if self.source is None else (self.source,)
        names = " ".join(type(part).__name__ for part in parts if part is not None)
        return [f"{names}, {self._load().num_samples} samples", *self._client_data().identity(self.skew)]

    def train_source(self) -> BatchSource:
        """Returns the source of the clients' training batches."""
        source = self._client_data().source(self.split, self.loading)
        return source if self.augmentation is None else AugmentedSource(source, self.augmentation)

    @contextmanager
    def training_on(self, split: Split) -> Iterator[None]:
        """Lets clients train on other samples within the block; what is held out stays the same."""
        divided = self._client_data()
        self._clients = replace(divided, division=replace(divided.division, split=split), hash=None)
        try:
            yield
        finally:
            self._clients = divided

    def held_out_source(self, part: Part) -> BatchSource:
        """Returns the batches of each (unseen) client's held-out samples, else of those ``part`` has of its users."""
        return self._client_data().held_out_source(part, self._eval_loading)

    def train_dataloader(self) -> DataLoader[Any]:
        """Returns the training data of all clients together, shuffled, for a centralised baseline."""
        return self._client_data().pooled(self.loading, self.augmentation)

    def val_dataloader(self) -> EvalLoaders:
        """Returns the batches of the validation set, an empty list when there is none."""
        if self._source is not None and self.val_fraction == 0:
            return self._source.loaders("val")
        return self._client_data().val_batches(self._eval_loading, self.held_out.val_split == "per_client")

    def test_dataloader(self) -> EvalLoaders:
        """Returns the batches of the test set, by name if there are several, an empty list when there is none.

        A single test set is named ``test`` if others were held out of the training set. If the users of its samples are
        known, the samples of users that do not train move to ``unseen``.
        """
        central = None if self._source is None else self._source.loaders("test")
        if central is not None and not (self.held_out.unseen_clients or self.held_out.client_test_fraction):
            return central
        return self._client_data().test_batches(self._eval_loading, central)

    def predict_dataloader(self) -> EvalLoaders:
        """Returns the batches to predict: those of the predict set if there is one, else of the test sets."""
        if self._source is not None and overrides(self._source.module, "predict_dataloader"):
            return self._source.loaders("predict")
        predict = None if self._source is not None else self._load().datasets.predict
        if predict is None:
            return self.test_dataloader()
        return self._client_data().set_batches("predict", predict, self._eval_loading)

    @property
    def num_classes(self) -> int | None:
        """Number of class names, else the largest label + 1; None when the targets are not class labels."""
        found = self._load().num_classes
        return found if self.skew is None else self.skew.num_classes(found)

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes in the order of their labels, None when there are none."""
        found = self._load().datasets.class_names
        names = found if self.skew is None else self.skew.class_names(found)
        return None if names is None else tuple(names)

    @property
    def mean(self) -> tuple[float, ...] | None:
        """What was subtracted from each channel of the inputs, in [0, 1], None when nothing was."""
        return self._per_channel(self._load().datasets.mean)

    @property
    def std(self) -> tuple[float, ...] | None:
        """What each channel was then divided by, None when by nothing."""
        return self._per_channel(self._load().datasets.std)

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        """Shape of one input (the first part of a sample), None when it has none."""
        shape = self._load().input_shape
        return shape if self.skew is None else self.skew.input_shape(shape)

    @property
    def labels(self) -> npt.NDArray[Any] | None:
        """The training labels that the model sees, shape (samples,), None when the targets are not class labels."""
        return self._client_data().labels

    @property
    def memory(self) -> int | None:
        """Bytes of the training tensors, and of the text that windows are gathered from; None when there are none."""
        return self._load().memory

    @property
    def division(self) -> Division:
        """What each client trains on and what is held out."""
        return self._client_data().division

    @property
    def client_names(self) -> tuple[str, ...] | None:
        """Names of the clients that train: keys of their data sets, or users; None where they have only numbers."""
        return (self._client_data().names or ())[: self.split.num_clients] or None

    @property
    def split(self) -> Split:
        """Which training samples each client trains on."""
        return self.division.split

    @property
    def split_hash(self) -> str:
        """SHA-256 in hexadecimal that names the clients.

        Equal hashes mean data of the same class, size and targets, and equal splits, held-out sets, drawn users and
        feature skews. Inputs are not read for it; where and how they are stored does not matter.
        """
        divided = self._client_data()
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
        known = {} if labels is None or num_classes is None else label_statistics(self.split, labels, num_classes)
        return self.split.summary() | {"hash": self.split_hash} | known

    def _load(self) -> LoadedData:
        if self._loaded is None:
            # Without a trainer nobody has called it yet; it must be cheap when there is nothing to do.
            if self._source is None:
                self.prepare_data()
            datasets = self.load_datasets().readable(self.targets_are_labels)
            own_val = None if self._source is None else self._source.loaders("val")
            expect(
                self.val_fraction == 0 or (datasets.val is None and not own_val),
                f"Expected either `--data.val_dataset` or `--data.val_fraction`, got both ({self.val_fraction}): set "
                "`--data.val_fraction 0` to keep the validation set.",
            )
            self._loaded = LoadedData.of(datasets, self.in_memory and self.loading.collate_fn is None)
        return self._loaded

    def _per_channel(self, values: Sequence[float] | None) -> tuple[float, ...] | None:
        values = values if self.skew is None else self.skew.per_channel(values)
        return None if values is None else tuple(values)

    def _context(self) -> tuple[Any, int]:
        seed = getattr(self.trainer, "seed", None) if self.split_seed is None else self.split_seed
        return self.trainer, run_seed() if seed is None else int(seed)  # Lightning's own Trainer has none

    def _client_data(self) -> ClientData:
        loaded, (_, seed) = self._load(), self._context()
        if self._clients is None or self._clients.division.seed != seed:
            partitioner, num_clients, train = self.partitioner, self.num_clients, loaded.datasets.train
            if self._may_come_split and isinstance(train, ClientDatasets):
                partitioner, num_clients = ByUser(), train.count(num_clients)
            self._clients = ClientData.of(loaded, self.held_out, partitioner, num_clients, seed, self.skew)
        return self._clients
