"""Makes data sets of other containers of samples: arrays, tables, and lists with a data set for each client."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from lightning_fed.data.adapters.clients import ClientDatasets, are_datasets
from lightning_fed.data.inspection import AnyDataset, name_kind
from lightning_fed.errors import FederatedError

__all__ = ["Columns", "are_columns", "as_dataset"]


class Columns(Dataset[Any]):
    """A table whose rows are the samples, as dicts by column name.

    Args:
        columns: One array for each column, all of equal length.

    Attributes:
        column_names: Names of the columns.
        tensors: The columns, None unless all hold numbers.
    """

    samples_are_rows = True  # where there are tensors

    def __init__(self, columns: Mapping[Any, Any]) -> None:
        self._columns = {str(name): _tensor(values) for name, values in columns.items()}
        self.column_names = list(self._columns)
        numbers = all(isinstance(values, Tensor) for values in self._columns.values())
        self.tensors = self._columns if numbers else None

    def __len__(self) -> int:
        """Number of rows."""
        return len(next(iter(self._columns.values())))

    def __getitem__(self, index: Any) -> Any:
        """Returns a row by its number, or a column by its name."""
        if isinstance(index, str):
            return self._columns[index]
        return {name: values[index] for name, values in self._columns.items()}


def as_dataset(container: Any, option: str, clients: bool = False) -> AnyDataset | Any:
    """Makes a data set of another container of samples; a data set stays as it is.

    A tuple of arrays of equal length (NumPy's too, also memory-mapped) is read row by row, a data frame or dict of
    arrays by column. Floating arrays become float32, integers wider than 8 bits int64. With ``clients``, a list or dict
    of data sets holds one for each client.
    """
    are_splits = isinstance(container, Mapping) and "train" in container  # as in Hugging Face's data, not clients
    if clients and are_datasets(container) and not are_splits:
        return ClientDatasets(container)
    if isinstance(container, tuple) and are_columns(container):
        return TensorDataset(*(_tensor(part) for part in container))
    if isinstance(container, Mapping) and are_columns(container.values()):
        return Columns(container)
    if hasattr(container, "iloc") and hasattr(container, "columns"):
        return Columns({name: container[name] for name in container.columns})
    is_listed = isinstance(container, list) and len({np.shape(part) for part in container if _is_array(part)}) > 1
    is_rows = is_listed and are_columns(container)
    of_sets = isinstance(container, list) and (are_datasets(container) or any(isinstance(c, type) for c in container))
    is_stream = isinstance(container, IterableDataset) and not clients
    is_read = container is None or is_stream or _is_read_by_number(container)
    if not is_read or is_rows or of_sets:
        raise FederatedError(
            f"Expected `{option}` to be a data set, a tuple of arrays or a data frame, got {_described(container)}."
        )
    return container


def _described(container: Any) -> str:
    kind = type(container).__name__
    if isinstance(container, Mapping):
        return f"a {kind} of {', '.join(map(str, list(container)[:5]))}: give its parts as options of their own"
    if isinstance(container, (tuple, list)):
        parts = ", ".join(sorted({type(part).__name__ for part in container}))
        hint = "of one length" if isinstance(container, tuple) else "in a tuple"
        arrays, one = f"arrays {hint}, where row i of each is sample i", "one data set, such as a torch ConcatDataset"
        return f"a {kind} of {len(container)} ({parts}): give {arrays if any(map(_is_array, container)) else one}"
    return name_kind(container)


def _is_read_by_number(container: Any) -> bool:
    """Whether samples can be read by number; like Python, it looks for the methods in the class."""
    if isinstance(container, (str, bytes, tuple, Mapping, IterableDataset)) or hasattr(container, "iloc"):
        return False
    return (
        all(hasattr(type(container), name) for name in ("__len__", "__getitem__"))
        and getattr(container, "ndim", 1) != 0
    )


def _is_array(value: Any) -> bool:
    return (isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0) or hasattr(value, "iloc")


def are_columns(parts: Any) -> bool:
    """Whether all parts are arrays, and of one length."""
    parts = list(parts)
    return bool(parts) and all(map(_is_array, parts)) and len(set(map(len, parts))) == 1


def _tensor(values: Any) -> Any:
    """Makes a tensor of a column of numbers, without a copy if the type stays; any other column becomes an array."""
    if isinstance(values, Tensor):
        return values
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        return array
    narrow = array.dtype.kind == "b" or array.dtype.itemsize == 1
    wanted = np.dtype(np.float32 if array.dtype.kind == "f" else array.dtype if narrow else np.int64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # samples are only read
        return torch.from_numpy(array.astype(wanted, copy=False))
