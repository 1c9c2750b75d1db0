"""What a data module loads, and what is found in it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_fed.core import is_news
from lightning_fed.data.containers import are_columns, as_dataset
from lightning_fed.data.inspection import (
    AnyDataset,
    Tensors,
    as_targets,
    expect_one_meaning,
    find_conversion,
    find_targets,
    find_tensors,
    find_users,
    first_input,
    length,
)
from lightning_fed.errors import FederatedError

__all__ = ["Datasets", "LoadedData"]

_MOST_CLASSES = 10_000  # of few samples


@dataclass(frozen=True)
class Datasets:
    """What a data module loads.

    Attributes:
        train: Training samples of all clients together.
        val: Central validation set, None for none (or for a held-out part of ``train``).
        test: Central test set, or several by name.
        predict: Samples to predict; None for the test set.
        targets: One target per training sample (list, tensor or array); None to look in ``train``.
        class_names: Names of the classes in the order of their labels, None when there are none.
        mean: What was subtracted from each channel of the inputs, in [0, 1], None when nothing was.
        std: What they were then divided by.
        users: The user, such as the writer, of each training sample (list, tensor or array of numbers or strings); None
            to look in ``train``.
        test_users: The user of each sample of ``test``, if that is one set; None to look in ``test``. With
            ``unseen_clients``, the samples of users that do not train move to the test set ``unseen``.
        user_names: What users that are numbers from 0 are called, in the order of these; None for their numbers.
        class_labels: Whether integer targets of at least 0 are class labels, not counts; None for what is likely.
    """

    train: AnyDataset
    val: AnyDataset | None = None
    test: AnyDataset | dict[str, AnyDataset] | None = None
    predict: AnyDataset | None = None
    targets: Any = None
    class_names: Sequence[str] | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    users: Any = None
    test_users: Any = None
    user_names: Sequence[str] | None = None
    class_labels: bool | None = None

    def readable(self, class_labels: bool | None = None) -> "Datasets":
        """Returns a copy with data sets in place of arrays, frames and lists of clients, and the option if given."""
        test = self.test
        if isinstance(test, dict) and not are_columns(test.values()):
            test = {name: as_dataset(part, "--data.test_dataset") for name, part in test.items()}
        else:
            test = as_dataset(test, "--data.test_dataset")
        return replace(
            self,
            train=as_dataset(self.train, "--data.train_dataset", clients=True),
            val=as_dataset(self.val, "--data.val_dataset"),
            test=test,
            predict=as_dataset(self.predict, "--data.predict_dataset"),
            class_labels=self.class_labels if class_labels is None else class_labels,
        )


@dataclass(frozen=True)
class LoadedData:
    """The data sets, and what was found in the training set.

    Attributes:
        datasets: The data sets.
        num_samples: Training samples.
        tensors: Tensors whose row i is training sample i, None when samples must be read one by one.
        targets: One target per training sample, shape (num_samples,), None when there are none.
        users: The user of each training sample, shape (num_samples,), None when they are unknown.
        in_memory: Whether data sets that hold tensors are read without a data loader.
    """

    datasets: Datasets
    num_samples: int
    tensors: Tensors | None
    targets: npt.NDArray[Any] | None
    users: npt.NDArray[Any] | None
    in_memory: bool

    @classmethod
    def of(cls, datasets: Datasets, in_memory: bool) -> "LoadedData":
        """Looks into the training set."""
        num_samples = length(datasets.train, "--data.train_dataset")
        tensors = find_tensors(datasets.train) if in_memory else None
        targets, users = _given(datasets, "targets", num_samples), _given(datasets, "users", num_samples)
        loaded = cls(datasets, num_samples, tensors, targets, users, in_memory)
        loaded._check_labels()
        return loaded

    @cached_property
    def labels(self) -> npt.NDArray[Any] | None:
        """The targets if they are class labels: integers of at least 0, and not ``too_many``."""
        return None if self.datasets.class_labels is False or self.too_many else _whole(self.targets)

    @property
    def too_many(self) -> bool:
        """Whether there would be more classes than samples, and than 10,000, and nobody says what the targets are."""
        return self._is_beyond(_whole(self.targets))

    def _is_beyond(self, whole: Any) -> bool:
        unsaid = self.datasets.class_labels is None and self.datasets.class_names is None
        return unsaid and whole is not None and bool(whole.max() >= max(_MOST_CLASSES, self.num_samples))

    @property
    def num_classes(self) -> int | None:
        """Number of class names, else the largest label + 1; None when the targets are not class labels."""
        labels, names = self.labels, self.datasets.class_names
        if names is not None:
            return len(names)
        return None if labels is None else int(labels.max()) + 1

    @cached_property
    def input_shape(self) -> tuple[int, ...] | None:
        """Shape of the first part of a training sample, None when that part has no shape."""
        sample = first_input(self.datasets.train)
        return tuple(sample.shape) if hasattr(sample, "shape") else None

    @property
    def memory(self) -> int | None:
        """Bytes of the tensors and of what inputs are made from, such as a text; None without tensors."""
        if self.tensors is None:
            return None
        tensors = list(self.tensors.values() if isinstance(self.tensors, dict) else self.tensors)
        attributes = getattr(find_conversion(self.datasets.train), "__dict__", {})
        tensors += [value for value in attributes.values() if isinstance(value, Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _check_labels(self) -> None:
        """Refuses labels of other sets beyond the training data's classes, as the model has no output for them."""
        datasets, num_classes = self.datasets, self.num_classes
        tests = datasets.test if isinstance(datasets.test, dict) else {"": datasets.test}
        sets = {"`--data.val_dataset`": datasets.val}
        sets |= {f"`--data.test_dataset` {name}".strip(): part for name, part in tests.items()}
        if datasets.class_labels is not False:
            expect_one_meaning({"the training data": datasets.train, **sets})
        if self.too_many and is_news("targets", largest := int(np.asarray(self.targets).max())):
            rank_zero_info(
                f"The targets, whole numbers up to {largest:,}, count as no class labels: there would be more classes "
                "than samples. Set `--data.class_labels` to say what they are."
            )
        # Targets that were given may differ from those that the model sees, such as groups of classes to split by.
        own = None if datasets.targets is None else find_targets(datasets.train)
        if self.labels is None or num_classes is None or self._is_beyond(_whole(own)):
            return
        if own is not None and own.dtype.kind in "iu":
            num_classes = max(num_classes, int(own.max()) + 1)
        for option, dataset in sets.items():
            found = None if dataset is None else find_targets(dataset)
            if found is not None and found.dtype.kind in "iu" and len(found) and found.max() >= num_classes:
                raise FederatedError(
                    f"Expected {option} to hold class labels from 0 to {num_classes - 1}, as the training data do, got "
                    f"{found.max()}: leave such samples out, or in a data module of your own give `Datasets` all "
                    "`class_names`, or set `--data.class_labels false` if targets are not class labels."
                )


def _whole(targets: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
    """Returns targets that are integers of at least 0, None for others."""
    is_whole = targets is not None and targets.dtype.kind in "iu" and len(targets) > 0 and targets.min() >= 0
    return targets if is_whole else None


def _given(datasets: Datasets, name: Literal["targets", "users"], num_samples: int) -> npt.NDArray[Any] | None:
    """Returns the targets or users that were given, else those found in the data set; None if there are none."""
    values, find = getattr(datasets, name), find_targets if name == "targets" else find_users
    array = find(datasets.train) if values is None else as_targets(values)
    if values is not None and (array is None or len(array) != num_samples):
        raise FederatedError(
            f"Expected `--data.{name}` to hold one value for each of the {num_samples} training samples, got "
            f"{'something else' if array is None else len(array)}."
        )
    # All samples without a user would become one client.
    if name == "users" and array is not None and array.dtype.kind == "f" and np.isnan(array).any():
        raise FederatedError(
            "Expected `--data.users` to name the user of each training sample, got NaN for "
            f"{np.isnan(array).sum()} of {len(array)}: leave these samples out, or give them users."
        )
    return array
