"""What can be learnt from a data set without knowing its class: tensors, targets, what a label means."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from textwrap import shorten
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from lightning_fed.core.seeding import isolated_streams
from lightning_fed.errors import FederatedError

if TYPE_CHECKING:
    AnyDataset: TypeAlias = Dataset[Any]
else:
    # With the type Dataset[Any] an option would refuse the arguments of a user's data set given by class path.
    AnyDataset = Dataset

__all__ = [
    "Conversion", "TARGET_NAMES", "Tensors", "as_targets", "expect_one_meaning", "find_class_lists",
    "find_conversion", "find_targets", "find_tensors", "find_users", "first_input", "first_part", "length",
    "map_tensors", "name_kind",
]  # fmt: skip

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
        return first_part(dataset[0])


def first_part(sample: Any) -> Any:
    """Returns the first part of a sample or a batch, or what it is if it has no parts."""
    if isinstance(sample, Mapping):
        return next(iter(sample.values()), None)
    has_parts = isinstance(sample, Sequence) and not isinstance(sample, str) and len(sample)
    return sample[0] if has_parts else sample


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


def find_class_lists(dataset: Any, depth: int = 8) -> list[tuple[str, dict[str, str]]]:
    """Returns the class of each label as a data set says it, or as those do that it wraps, with whose list it is.

    It looks at ``class_to_idx``, at ``classes`` if these are words, and at the names that a table of Hugging Face has
    for its target column. A ``target_transform`` is followed; a wrapper that changes ``targets`` is not looked into.
    """
    if hasattr(dataset, "class_lists"):  # those of many clients
        return list(dataset.class_lists)
    names, labels = getattr(dataset, "classes", None), getattr(dataset, "class_to_idx", None)
    if isinstance(features := getattr(dataset, "features", None), Mapping):
        names = next((features[name].names for name in TARGET_NAMES if hasattr(features.get(name), "names")), names)
    if not isinstance(labels, Mapping):
        words = as_targets(names)
        labels = {n: i for i, n in enumerate(words)} if words is not None and words.dtype.kind == "U" else {}
    if labels:
        change = getattr(dataset, "target_transform", None) or (lambda label: label)
        with isolated_streams(0), suppress(Exception):  # it may want more than the number of a class
            return [("", {str(np.asarray(change(i)).squeeze().tolist()): str(n) for n, i in labels.items()})]
    return [each for part in _wrapped(dataset) for each in find_class_lists(part, depth - 1)] if depth else []


def expect_one_meaning(sets: Mapping[str, Any]) -> None:
    """Refuses data sets, each with its name for the message, of which two mean different classes by one label."""
    known: dict[tuple[str, str], tuple[Any, ...]] = {}
    for option, dataset in sets.items():
        for place, classes in find_class_lists(dataset):
            where = f"{place} of {option}" if place else option
            for label, name in classes.items():
                entry = (label, name, where, shorten(", ".join(classes.values()), 200))
                other = known.setdefault(("label", label), known.get(("name", name), entry))
                known.setdefault(("name", name), entry)
                if other[:2] != entry[:2] and other[2:] != entry[2:]:
                    one, two = (f"{each[0]} for {each[1]} in {each[2]} ({each[3]})" for each in (other, entry))
                    raise FederatedError(
                        f"Expected a label to mean one class in all data sets, got {one} and {two}: number the classes "
                        "alike, for example by a `target_transform`, or set `--data.class_labels false` if targets are "
                        "not class labels."
                    )


def _wrapped(dataset: Any) -> list[Any]:
    """Returns the data sets that a data set holds as attributes, without those whose targets it changes."""
    own = as_targets(getattr(dataset, "targets", None))
    held: list[Any] = []
    for value in getattr(dataset, "__dict__", {}).values():
        parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
        for part in parts if parts and isinstance(parts[0], Dataset) else [value]:
            if isinstance(part, Dataset) or hasattr(part, "column_names"):
                inner = None if own is None else as_targets(getattr(part, "targets", None))
                changed = own is not None and inner is not None and len(own) == len(inner) and (own != inner).any()
                held += [] if changed else [part]
    return held
