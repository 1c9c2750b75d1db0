"""What can be learnt from a data set without knowing its class: its tensors, its targets, the shape of an input."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from lightning_fed.core.seeding import isolated_streams
from lightning_fed.errors import FederatedError

__all__ = [
    "TARGET_NAMES", "AnyDataset", "Conversion", "Tensors", "as_targets", "find_conversion", "find_targets",
    "find_tensors", "find_users", "first_input", "length", "map_tensors", "name_kind",
]  # fmt: skip

if TYPE_CHECKING:
    AnyDataset: TypeAlias = Dataset[Any]
else:
    # With the type Dataset[Any] an option would refuse the arguments of a user's data set given by class path.
    AnyDataset = Dataset

Tensors: TypeAlias = tuple[Tensor, ...] | dict[str, Tensor]
Conversion: TypeAlias = Callable[[Tensor], Tensor]

TARGET_NAMES = ("targets", "target", "labels", "label", "y")
_USER_NAMES = ("users", "user")


def name_kind(value: object) -> str:
    """Names what was given instead of a data set, and says what to give."""
    if isinstance(value, type):
        return f"the class {value.__name__}: give an instance of it"
    kind = type(value).__name__
    if isinstance(value, DataLoader):
        return f"a {kind}: give its data set here, or loaders to `fit(model, train_dataloaders=...)`"
    stream = f"{kind}, a stream" if isinstance(value, IterableDataset) else kind
    return f"{stream}: give a torch Dataset with `__len__` and `__getitem__`"


def length(dataset: object, option: str) -> int:
    """Returns the number of samples of a map-style data set."""
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise FederatedError(f"Expected `{option}` to be a map-style data set, got {name_kind(dataset)}.")
    return len(dataset)


def map_tensors(tensors: Tensors, function: Callable[[Tensor], Tensor]) -> Tensors:
    """Applies a function to every tensor."""
    if isinstance(tensors, dict):
        return {name: function(tensor) for name, tensor in tensors.items()}
    return tuple(function(tensor) for tensor in tensors)


def find_tensors(dataset: AnyDataset) -> Tensors | None:
    """Returns tensors whose row i is sample i, or None when the data set must be read sample by sample.

    This needs TensorDataset's own ``__getitem__``, or a class that sets ``samples_are_rows = True``: only its author
    knows that ``__getitem__`` computes nothing.
    """
    if type(dataset) is Subset:
        inner, rows = find_tensors(dataset.dataset), torch.as_tensor(dataset.indices, dtype=torch.int64)
        return None if inner is None else map_tensors(inner, lambda part: part.index_select(0, rows.to(part.device)))
    tensors = _declared_tensors(dataset)
    trusted = type(dataset).__getitem__ is TensorDataset.__getitem__ or getattr(dataset, "samples_are_rows", False)
    return tensors if trusted else None


def find_conversion(dataset: AnyDataset) -> Conversion | None:
    """Returns the function that makes inputs from a batch of stored ones (the first tensor); None if there is none."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return getattr(dataset, "convert_inputs", None)


def as_targets(values: Any) -> npt.NDArray[Any] | None:
    """Returns one number or string per sample (a list, tensor or array) as an array, None for anything else."""
    try:
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
        if array.dtype.kind in "OT" and array.ndim == 1:  # as pandas keeps strings
            values = array.tolist()
            array = np.asarray(values)
    except (TypeError, ValueError):
        return None
    if array.ndim != 1 or array.dtype.kind not in "biufUS":
        return None
    # Among strings, NumPy turns a missing value into the string "nan".
    mixed = array.dtype.kind in "US" and array is not values and any(isinstance(value, float) for value in values)
    return None if mixed else array


def find_targets(dataset: AnyDataset) -> npt.NDArray[Any] | None:
    """Returns one target per sample, or None when the data set does not tell.

    It looks, in this order, into the parts of a subset or a concatenation, at attributes ``targets`` and ``labels``, at
    a column or tensor with a known name, and at the second of several tensors if it holds one integer per sample.
    """
    return _find(dataset, ("targets", "labels"), TARGET_NAMES)


def find_users(dataset: AnyDataset) -> npt.NDArray[Any] | None:
    """Returns the user of each sample, or None when the data set does not tell.

    It looks into the parts of a subset or a concatenation, at an attribute ``users``, and at a column or tensor
    ``users`` or ``user``.
    """
    return _find(dataset, ("users",), _USER_NAMES)


def first_input(dataset: AnyDataset) -> Any:
    """Returns the first part of the first sample, None when it has none."""
    with isolated_streams(0):
        sample = dataset[0]
    if isinstance(sample, Mapping):
        sample = next(iter(sample.values()), None)
    elif isinstance(sample, Sequence) and not isinstance(sample, str) and len(sample):
        sample = sample[0]
    return sample


def _find(dataset: AnyDataset, attributes: Sequence[str], names: Sequence[str]) -> npt.NDArray[Any] | None:
    """Returns the first candidate that holds one value per sample."""
    if hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        inner = _find(dataset.dataset, attributes, names)
        return None if inner is None else inner[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [_find(part, attributes, names) for part in dataset.datasets]
        known = [part for part in parts if part is not None]
        return np.concatenate(known) if len(known) == len(parts) else None
    for candidate in _candidates(dataset, attributes, names):
        values = as_targets(candidate)
        if values is not None and hasattr(dataset, "__len__") and len(values) == len(dataset):
            return values
    return None


def _candidates(dataset: AnyDataset, attributes: Sequence[str], names: Sequence[str]) -> list[Any]:
    found = [getattr(dataset, name) for name in attributes if hasattr(dataset, name)]
    known: Any = getattr(dataset, "column_names", None)  # of a table, such as a data set of Hugging Face
    found += [dataset[name][:] for name in names if name in known] if isinstance(known, list) else []
    tensors = _declared_tensors(dataset)
    if isinstance(tensors, dict):
        return found + [tensors[name] for name in names if name in tensors]
    if tensors is not None and names is TARGET_NAMES and len(tensors) > 1 and not tensors[1].is_floating_point():
        found.append(tensors[1])
    return found


def _declared_tensors(dataset: AnyDataset) -> Tensors | None:
    tensors = getattr(dataset, "tensors", None)
    if not isinstance(tensors, (Mapping, tuple, list)):
        return None
    parts = list(tensors.values()) if isinstance(tensors, Mapping) else list(tensors)
    size = len(dataset) if hasattr(dataset, "__len__") else None
    if not parts or not all(isinstance(part, Tensor) and part.ndim > 0 and len(part) == size for part in parts):
        return None
    return dict(tensors) if isinstance(tensors, Mapping) else tuple(parts)
