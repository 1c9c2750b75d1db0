"""Data divided over clients with one seed: the batches of every part, and a description of the clients."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, StackDataset, Subset

from lightning_fed.core.user_code import describe
from lightning_fed.data.augmentation import Augmentation, AugmentingCollate
from lightning_fed.data.batch_sources import (
    BatchSource,
    EvalBatches,
    EvalLoader,
    EvalLoaders,
    JoinedBatches,
    LoaderSource,
    SetBatches,
    TensorSource,
)
from lightning_fed.data.collation import CheckedCollate, Collate, Loading
from lightning_fed.data.containers import ClientDatasets
from lightning_fed.data.holdout import (
    CENTRAL,
    Division,
    DivisionOptions,
    HeldOut,
    client_names,
    divide,
    own_samples,
    unseen_users,
)
from lightning_fed.data.inspection import AnyDataset, find_conversion, find_targets, find_tensors, first_input, length
from lightning_fed.data.loading import LoadedData
from lightning_fed.data.partitioners import Partitioner
from lightning_fed.data.skews import DataFacts, FeatureSkew, SkewedBatches, SkewedRows, SkewedSource
from lightning_fed.data.split import Split
from lightning_fed.errors import FederatedError

__all__ = ["ClientData", "Part"]

Part: TypeAlias = Literal["val", "test", "unseen"]
SEEN_SCHEMES, NEW_SCHEME = "seen_schemes", "new_scheme"


@dataclass
class ClientData:
    """The data sets, and which client holds which samples.

    Attributes:
        loaded: The data sets.
        division: What each client trains on, and what is held out.
        skew: How samples look at each client, also at those that do not train; None without a skew.
        hash: The data module's ``split_hash``, once it was computed.
    """

    loaded: LoadedData
    division: Division
    skew: FeatureSkew | None
    hash: str | None = None

    @classmethod
    def of(
        cls,
        loaded: LoadedData,
        options: DivisionOptions,
        partitioner: Partitioner,
        num_clients: int | None,
        seed: int,
        skew: FeatureSkew | None,
    ) -> "ClientData":
        """Divides the data, and prepares the skew if there is one; the arguments are those of ``divide``."""
        datasets = loaded.datasets
        if partitioner.reads == "targets" and (loaded.too_many or datasets.class_labels is False):
            raise FederatedError(
                f"Expected class labels for the partitioner {type(partitioner).__name__}, got targets that are none "
                "(`--data.class_labels false`, or more classes than samples): set it to true, or choose "
                "`--data.partitioner IID`."
            )
        division = divide(options, partitioner, loaded.targets, loaded.users, loaded.num_samples, num_clients, seed)
        if skew is not None:
            first, mean, std = first_input(datasets.train), datasets.mean or (0.0,), datasets.std or (1.0,)
            sample = first if isinstance(first, Tensor) else None
            skew = skew.prepare(
                division.num_owners, seed, DataFacts(sample, loaded.num_classes, tuple(mean), tuple(std))
            )
        elif isinstance(datasets.test, dict):  # a skew renames them
            _expect_free_names(datasets.test, division.tests())
        return cls(loaded, division, skew)

    @property
    def labels(self) -> npt.NDArray[Any] | None:
        """The training labels that the model sees, shape (samples,), None when the targets are not class labels."""
        labels = self.loaded.labels
        if labels is None or self.skew is None:
            return labels
        targets = torch.from_numpy(np.asarray(labels, dtype=np.int64))
        return self.skew.labels(targets, self.skew.draws("train", len(labels))).numpy()

    @cached_property
    def names(self) -> tuple[str, ...] | None:
        """What clients are called, those that train first; None where they have only their numbers."""
        train, called = self.loaded.datasets.train, self.loaded.datasets.user_names
        called = train.client_names if isinstance(train, ClientDatasets) else called
        return client_names(self.loaded.users, called, self.division)

    def identity(self, skew: FeatureSkew | None) -> list[str]:
        """Describes the targets, and the skew by all that its schemes depend on apart from the data."""
        named, division = _name_targets(self.loaded.targets), self.division
        if skew is None:
            return [named, "no skew"]
        options = json.dumps(describe(skew)["init_args"], sort_keys=True)
        return [named, f"{type(skew).__name__} {options}, {division.num_owners} clients, seed {division.seed}"]

    def source(self, split: Split, loading: Loading, own: Any = None) -> BatchSource:
        """Returns the clients' batches of a split of the training set, skewed but not augmented, or of another set."""
        dataset, tensors = self.loaded.datasets.train, self.loaded.tensors
        if own is not None:
            dataset, tensors = own, None if tensors is None else find_tensors(own)
        source: BatchSource = LoaderSource(dataset, split, loading)
        if tensors is not None:
            source = TensorSource(tensors, split, loading.batch_size, find_conversion(dataset), loading.drop_last)
        return source if self.skew is None else SkewedSource(source, split, self.training_rows(self.skew))

    def training_rows(self, skew: FeatureSkew) -> SkewedRows:
        """Returns how a skew shows each row of the training set."""
        size = self.loaded.num_samples
        return SkewedRows(skew, skew.draws("train", size), _schemes(skew, self.division.owners(size)))

    def pooled(self, loading: Loading, augmentation: Augmentation | None) -> DataLoader[Any]:
        """Returns the training data of all clients together, shuffled."""
        train = self.loaded.datasets.train
        collate: Collate = CheckedCollate(loading.collate_fn)
        if self.skew is not None:
            numbers: Any = range(self.loaded.num_samples)
            train = StackDataset(numbers, train)
            collate = partial(self.training_rows(self.skew).collate, collate)
        if augmentation is not None:
            collate = AugmentingCollate(augmentation, collate)
        rows = Subset(train, np.sort(self.division.split.index).tolist())
        return DataLoader(
            rows, loading.batch_size, True, collate_fn=collate, drop_last=loading.drop_last, **loading.workers
        )

    def held_out_source(self, part: Part, loading: Loading) -> BatchSource:
        """Returns the batches of what was held out of each client, else of what its user has in the data's own set."""
        datasets = self.loaded.datasets
        own, users = (datasets.test, datasets.test_users) if part == "test" else (datasets.val, None)
        # A skew makes how samples look of their rows in the training set.
        is_held = len(self._held(part)) or self.skew is not None
        split = None if is_held else own_samples(own, users, self.loaded.users, self.division)
        return self.source(self.held_out_split(part), loading) if split is None else self.source(split, loading, own)

    def _held(self, part: Part) -> HeldOut:
        return {"val": self.division.val, "test": self.division.clients, "unseen": self.division.unseen}[part]

    def held_out_split(self, part: Part) -> Split:
        """Returns which rows were held out of each client for validation, or for test, or are of each unseen client."""
        held, num_clients = self._held(part), self.division.split.num_clients
        if not len(held) or held.owners[0] == CENTRAL:
            option = "client_test_fraction 0.2" if part == "test" else "val_split per_client --data.val_fraction 0.2"
            raise FederatedError(
                f"Expected data with {part} samples of each client, got none: hold some out with `--data.{option}`, or "
                f"give a {part} set that knows its users, as the training set does."
            )
        first, end = (num_clients, self.division.num_owners) if part == "unseen" else (0, num_clients)
        sizes = np.bincount(held.owners - first, minlength=end - first)
        return Split(held.rows, np.concatenate([[0], np.cumsum(sizes)]))

    def val_batches(self, loading: Loading, per_client: bool) -> EvalLoaders:
        """Returns the batches of the validation set: what was held out, else the data's own, else an empty list."""
        held_out, targets = self.division.val, self.loaded.targets
        if not len(held_out):
            return self.set_batches("val", self.loaded.datasets.val, loading)
        if self.skew is None or per_client:
            return self._held_out(held_out, loading)
        rows = Subset(self.loaded.datasets.train, held_out.rows.tolist())
        targets = None if targets is None else targets[held_out.rows]
        return self._central("val", rows, self._set(rows, loading), True, targets)

    def test_batches(self, loading: Loading, central: EvalLoaders | None) -> EvalLoaders:
        """Returns the batches of all test sets: what was held out, and ``central`` or the data's own sets.

        Beside held-out sets (``clients``, ``unseen``) a single test set is named ``test``.
        """
        datasets = self.loaded.datasets
        test: Any = datasets.test
        parts = {name: self._held_out(part, loading) for name, part in self.division.tests().items()}
        by_user = unseen_users(test, datasets.test_users, self.loaded.users, self.division)
        if by_user is not None:
            known, unseen = by_user
            parts["unseen"] = JoinedBatches([parts["unseen"], self._held_out(unseen, loading, "test", test)])
            test = Subset(test, known.tolist()) if len(known) else None
        loaders = self.set_batches("test", test, loading) if central is None else central
        if not parts:
            return loaders
        if isinstance(loaders, (list, tuple)):
            loaders = {f"test_{number}": loader for number, loader in enumerate(loaders)}
        named = loaders if isinstance(loaders, dict) else {"test": loaders}
        _expect_free_names(named, parts)
        return {**named, **parts}

    def set_batches(
        self, stage: str, dataset: AnyDataset | dict[str, AnyDataset] | None, loading: Loading
    ) -> EvalLoaders:
        """Returns batches of one data set, of several by name, or an empty list when there is none.

        Under a skew, ``val`` shows the clients' schemes and ``predict`` the new one. ``test`` makes two sets, one with
        the clients' schemes and one with the new one; their names follow that of the data set.
        """
        if dataset is None:
            return []
        views = (SEEN_SCHEMES, NEW_SCHEME) if stage == "test" and self.skew is not None else ("",)
        found: dict[str, EvalLoader] = {}
        for name, part in (dataset if isinstance(dataset, dict) else {"": dataset}).items():
            loader, stream = self._set(part, loading), f"{stage}/{name}" if name else stage
            for view in views:
                seen = stage == "val" or view == SEEN_SCHEMES
                found["/".join(filter(None, (name, view)))] = self._central(stream, part, loader, seen)
        return found if isinstance(dataset, dict) or len(views) > 1 else found[""]

    def _set(self, dataset: AnyDataset, loading: Loading) -> SetBatches:
        """Returns slices of a data set in memory, else a data loader that does not shuffle."""
        tensors = find_tensors(dataset) if self.loaded.in_memory else None
        if tensors is not None:
            return EvalBatches(tensors, loading.batch_size, find_conversion(dataset))
        collate = CheckedCollate(loading.collate_fn)
        return DataLoader(dataset, loading.batch_size, collate_fn=collate, **loading.workers)

    def _central(
        self, name: str, dataset: AnyDataset, loader: SetBatches, seen: bool, targets: npt.NDArray[Any] | None = None
    ) -> EvalLoader:
        """Returns a central set, under a skew in the clients' schemes or in the one that no client has.

        Each class is spread over the schemes as over the clients' training samples; the set's targets, shape
        (samples,), are found in it if not given.
        """
        if self.skew is None:
            return loader
        size, split, owned = length(dataset, "--data.test_dataset"), self.division.split, self.loaded.targets
        schemes: Any = self.skew.num_clients
        if seen:
            targets = find_targets(dataset) if targets is None else targets
            owned = None if owned is None else owned[split.index]
            schemes = self.skew.clients(name, size if targets is None else targets, split.owners, owned)
        return SkewedBatches(loader, SkewedRows(self.skew, self.skew.draws(name, size), schemes))

    def _held_out(self, part: HeldOut, loading: Loading, name: str = "train", dataset: Any = None) -> EvalLoader:
        """Returns the batches of some rows, each in the scheme of its client."""
        dataset = self.loaded.datasets.train if dataset is None else dataset
        loader = self._set(Subset(dataset, part.rows.tolist()), loading)
        if self.skew is None:
            return loader
        draws = self.skew.draws(name, len(dataset))[torch.from_numpy(part.rows)]
        return SkewedBatches(loader, SkewedRows(self.skew, draws, _schemes(self.skew, part.owners)))


def _schemes(skew: FeatureSkew, owners: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns the scheme of each sample; the new one if no client owns it."""
    return np.where(owners == CENTRAL, skew.num_clients, owners)


def _expect_free_names(named: Iterable[str], held_out: Iterable[str]) -> None:
    """Refuses a test set of the data that has the name of a held-out one."""
    for name in set(named).intersection(held_out):
        option = "unseen_clients" if name == "unseen" else "client_test_fraction"
        raise FederatedError(
            f"Expected no test set named {name} beside the one that `--data.{option}` makes, but the data have "
            f"one: set `--data.{option} 0`, or rename theirs."
        )


def _name_targets(targets: npt.NDArray[Any] | None) -> str:
    """Describes targets, shape (samples,), by their kind and a SHA-256, so that int32 and int64 give the same."""
    if targets is None:
        return "no targets"
    if targets.dtype.kind in "US":
        words = np.char.encode(targets, "utf-8") if targets.dtype.kind == "U" else targets
        kind, content = "strings", b"\0".join(words.tolist())
    elif targets.dtype.kind == "f":
        kind, content = "numbers", targets.astype("<f8").tobytes()
    else:
        kind, content = "integers", targets.astype("<i8").tobytes()
    return f"{kind} {hashlib.sha256(content).hexdigest()}"
