"""What a data module loads, what is found in it, and how it is read for evaluation."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy.typing as npt
from torch.utils.data import DataLoader

from lightning_fed.data.inspection import AnyDataset, Tensors, as_targets, find_targets, find_tensors, length
from lightning_fed.data.sources import EvalBatches
from lightning_fed.errors import FederatedError

__all__ = ["Datasets", "EvalLoader", "EvalLoaders", "LoadedData", "eval_loader", "eval_loaders", "worker_options"]

EvalLoader: TypeAlias = EvalBatches | DataLoader[Any]
# Where there is no such set, Lightning expects an empty list, not None.
EvalLoaders: TypeAlias = EvalLoader | dict[str, EvalLoader] | list[EvalLoader]


@dataclass(frozen=True)
class Datasets:
    """What a data module loads.

    Attributes:
        train: Training samples of all clients together.
        val: Central validation set, None for none (or for a held-out part of ``train``).
        test: Central test set, or several by name.
        predict: What predictions are made for; None for the test set.
        targets: One target per training sample (list, tensor or array); None to look in ``train``.
    """

    train: AnyDataset
    val: AnyDataset | None = None
    test: AnyDataset | dict[str, AnyDataset] | None = None
    predict: AnyDataset | None = None
    targets: Any = None


@dataclass(frozen=True)
class LoadedData:
    """The data sets, and what was found in the training set.

    Attributes:
        datasets: The data sets.
        num_samples: Training samples.
        tensors: Tensors whose row i is training sample i, None when samples must be read one by one.
        targets: One target per training sample, shape (num_samples,), None when there are none.
    """

    datasets: Datasets
    num_samples: int
    tensors: Tensors | None
    targets: npt.NDArray[Any] | None

    @classmethod
    def of(cls, datasets: Datasets, in_memory: bool) -> "LoadedData":
        """Looks into the training set.

        Raises:
            FederatedError: If it is no map-style data set, or the targets do not fit it.
        """
        num_samples = length(datasets.train, "--data.train_dataset")
        tensors = find_tensors(datasets.train) if in_memory else None
        return cls(datasets, num_samples, tensors, _targets(datasets, num_samples))

    @property
    def labels(self) -> npt.NDArray[Any] | None:
        """The targets if they are class labels: integers of at least 0."""
        targets = self.targets
        is_label = targets is not None and targets.dtype.kind in "iu" and len(targets) > 0 and targets.min() >= 0
        return targets if is_label else None


def _targets(datasets: Datasets, num_samples: int) -> npt.NDArray[Any] | None:
    if datasets.targets is None:
        return find_targets(datasets.train)
    targets = as_targets(datasets.targets)
    if targets is None or len(targets) != num_samples:
        raise FederatedError(
            f"Expected `--data.targets` to hold one value for each of the {num_samples} training samples, got "
            f"{'something else' if targets is None else len(targets)}."
        )
    return targets


def eval_loaders(
    dataset: AnyDataset | dict[str, AnyDataset] | None, batch_size: int, in_memory: bool, num_workers: int
) -> EvalLoaders:
    """Returns batches of one data set, of several by name, or an empty list when there is none."""
    if dataset is None:
        return []
    if isinstance(dataset, dict):
        return {name: eval_loader(part, batch_size, in_memory, num_workers) for name, part in dataset.items()}
    return eval_loader(dataset, batch_size, in_memory, num_workers)


def eval_loader(dataset: AnyDataset, batch_size: int, in_memory: bool, num_workers: int) -> EvalLoader:
    """Returns slices of data in memory, else a data loader that does not shuffle."""
    tensors = find_tensors(dataset) if in_memory else None
    if tensors is not None:
        return EvalBatches(tensors, batch_size)
    return DataLoader(dataset, batch_size, **worker_options(num_workers))


def worker_options(num_workers: int) -> dict[str, Any]:
    """Options of a data loader whose workers outlive one pass."""
    return {"num_workers": num_workers, "persistent_workers": num_workers > 0}
