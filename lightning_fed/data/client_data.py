"""Data divided over clients with one seed: the batches of every part, and a description of the clients."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, Subset

from lightning_fed.core.user_code import describe
from lightning_fed.data.augmentation import Augmentation, AugmentingCollate
from lightning_fed.data.collation import CheckedCollate, Collate, Loading
from lightning_fed.data.holdout import CENTRAL, Division, DivisionOptions, HeldOut, divide
from lightning_fed.data.evaluation import JoinedBatches, expect_free_names, join_tests, worker_options
from lightning_fed.data.inspection import AnyDataset, find_conversion, find_tensors
from lightning_fed.data.loading import LoadedData
from lightning_fed.data.partitioners import Partitioner
from lightning_fed.data.skews import FeatureSkew, SkewedSets
from lightning_fed.data.skews.views import numbered_rows
from lightning_fed.data.sources import BatchSource, EvalLoader, EvalLoaders, LoaderSource, SetBatches, TensorSource
from lightning_fed.data.split import Split
from lightning_fed.data.user_tests import divide_by_user, own_samples
from lightning_fed.errors import FederatedError

__all__ = ["DividedData"]

_Load: TypeAlias = Callable[[AnyDataset], SetBatches]  # makes the batches of an evaluation set


@dataclass
class DividedData:
    """The data sets, and which client holds which samples.

    Attributes:
        loaded: The data sets.
        division: What each client trains on, and what is held out.
        skewed: How samples look at each client; None without a skew.
        hash: The data module's ``split_hash``, once it was computed.
    """

    loaded: LoadedData
    division: Division
    skewed: SkewedSets | None
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
    ) -> "DividedData":
        """Divides the data, and prepares the skew if there is one; the arguments are those of ``divide``."""
        if partitioner.reads == "targets" and (loaded.too_many or loaded.datasets.class_labels is False):
            raise FederatedError(
                f"Expected class labels for the partitioner {type(partitioner).__name__}, got targets that are none "
                "(`--data.class_labels false`, or more classes than samples): set it to true, or choose "
                "`--data.partitioner IID`."
            )
        division = divide(options, partitioner, loaded.targets, loaded.users, loaded.num_samples, num_clients, seed)
        if skew is None and isinstance(loaded.datasets.test, dict):  # a skew renames them
            expect_free_names(loaded.datasets.test, division.tests())
        return cls(loaded, division, None if skew is None else SkewedSets.of(skew, loaded, division))

    @property
    def labels(self) -> npt.NDArray[Any] | None:
        """The training labels that the model sees, shape (samples,), None when the targets are not class labels."""
        labels = self.loaded.labels
        return labels if labels is None or self.skewed is None else self.skewed.labels(labels)

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
        source: BatchSource = LoaderSource(dataset, split, **vars(loading))
        if tensors is not None:
            source = TensorSource(tensors, split, loading.batch_size, find_conversion(dataset), loading.drop_last)
        return source if self.skewed is None else self.skewed.source(source, split)

    def pooled(self, loading: Loading, augmentation: Augmentation | None) -> DataLoader[Any]:
        """Returns the training data of all clients together, shuffled."""
        train = self.loaded.datasets.train
        collate: Collate = CheckedCollate(loading.collate_fn)
        if self.skewed is not None:
            train, collate = numbered_rows(train), self.skewed.collate(loading.collate_fn)
        if augmentation is not None:
            collate = AugmentingCollate(augmentation, collate)
        rows = Subset(train, np.sort(self.division.split.index).tolist())
        return DataLoader(
            rows, loading.batch_size, True, collate_fn=collate, drop_last=loading.drop_last, **worker_options(loading)
        )

    def held_out_source(self, part: Literal["val", "test"], loading: Loading) -> BatchSource:
        """Returns the batches of what was held out of each client, else of what its user has in the data's own set."""
        datasets = self.loaded.datasets
        own, users = (datasets.val, None) if part == "val" else (datasets.test, datasets.test_users)
        # A skew makes how samples look of their rows in the training set.
        is_held = len(self.division.val if part == "val" else self.division.clients) or self.skewed is not None
        split = None if is_held else own_samples(own, users, self.loaded.users, self.division)
        return self.source(self.held_out_split(part), loading) if split is None else self.source(split, loading, own)

    def held_out_split(self, part: Literal["val", "test"]) -> Split:
        """Returns which rows were held out of each client for validation, or for test."""
        held = self.division.val if part == "val" else self.division.clients
        if not len(held) or held.owners[0] == CENTRAL:
            option = "client_test_fraction 0.2" if part == "test" else "val_split per_client --data.val_fraction 0.2"
            raise FederatedError(
                f"Expected data with {part} samples of each client, got none: hold some out with `--data.{option}`, or "
                f"give a {part} set that knows its users, as the training set does."
            )
        sizes = np.bincount(held.owners, minlength=self.division.split.num_clients)
        return Split(held.rows, np.concatenate([[0], np.cumsum(sizes)]))

    def val_batches(self, load: _Load, per_client: bool) -> EvalLoaders:
        """Returns the batches of the validation set: what was held out, else the data's own, else an empty list."""
        held_out = self.division.val
        if not len(held_out):
            return self.set_batches("val", self.loaded.datasets.val, load)
        if self.skewed is None or per_client:
            return self._held_out(held_out, load)
        rows = Subset(self.loaded.datasets.train, held_out.rows.tolist())
        targets = None if self.loaded.targets is None else self.loaded.targets[held_out.rows]
        return self.skewed.seen("val", rows, load(rows), targets)

    def test_batches(self, load: _Load, central: EvalLoaders | None) -> EvalLoaders:
        """Returns the batches of all test sets: what was held out, and ``central`` or the data's own sets."""
        test: Any = self.loaded.datasets.test
        parts = {name: self._held_out(part, load) for name, part in self.division.tests().items()}
        if (by_user := divide_by_user(self.loaded.datasets, self.loaded.users, self.division)) is not None:
            known, unseen = by_user
            parts["unseen"] = JoinedBatches([parts["unseen"], self._held_out(unseen, load, "test", test)])
            test = Subset(test, known.tolist()) if len(known) else None
        loaders = self.set_batches("test", test, load) if central is None else central
        return join_tests(loaders, parts) if parts else loaders

    def set_batches(self, stage: str, dataset: AnyDataset | dict[str, AnyDataset] | None, load: _Load) -> EvalLoaders:
        """Returns batches of one data set, of several by name, or an empty list when there is none."""
        if dataset is None:
            return []
        if self.skewed is not None:
            return self.skewed.loaders(stage, dataset, load)
        return {name: load(part) for name, part in dataset.items()} if isinstance(dataset, dict) else load(dataset)

    def _held_out(self, part: HeldOut, load: _Load, name: str = "train", dataset: Any = None) -> EvalLoader:
        """Returns the batches of some rows, each in the scheme of its client."""
        dataset = self.loaded.datasets.train if dataset is None else dataset
        loader = load(Subset(dataset, part.rows.tolist()))
        return loader if self.skewed is None else self.skewed.held_out(name, len(dataset), part, loader)


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
