"""Makes data sets of other containers of samples: arrays, tables, and lists with a data set for each client."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_fed.data.inspection import find_class_lists, find_conversion, find_targets, find_tensors, name_kind
from lightning_fed.errors import FederatedError, expect_count

__all__ = ["ClientDatasets", "Columns", "DEFAULT_CLIENTS", "are_columns", "are_datasets", "as_dataset"]

DEFAULT_CLIENTS = 10
_MOST_COUNTED = 1_000_000  # samples of a stream without a length; beyond that it may have no end


class ClientDatasets(Dataset[Any]):
    """One data set for each client; client i is the i-th of them.

    A function's data sets are made when they are read, and only the newest is kept. A stream (``IterableDataset``) is
    read into memory each time, and once more to be counted if it has no length.

    Args:
        datasets: A list or dict of data sets, or a function that returns the data set of a client's number, from 0.
        num_clients: Number of clients, if ``datasets`` is a function.

    Attributes:
        users: The client of each sample, shape (samples,), int64.
        client_names: The keys of a dict; None without.
        targets: One target per sample, None if a data set does not tell.
        tensors: The samples of all clients, None unless all hold tensors.
        class_lists: The different lists of classes, see ``find_class_lists``.
    """

    samples_are_rows = True  # where there are tensors

    def __init__(self, datasets: Any, num_clients: int | None = None) -> None:
        self._make: Callable[[int], Any] | None = datasets
        self._parts: list[Any] = []
        self.client_names = list(map(str, datasets)) if isinstance(datasets, Mapping) else None
        if isinstance(datasets, (Mapping, Sequence)):
            self._parts = list(datasets.values() if isinstance(datasets, Mapping) else datasets)
            self._make, num_clients = None, len(self._parts)
        expect_count("num_clients of ClientDatasets", num_clients)
        assert num_clients is not None
        sizes, targets = [], []
        lists: dict[Any, tuple[str, dict[str, str]]] = {}
        for client in range(num_clients):
            part = self._part(client)
            name = client if self.client_names is None else self.client_names[client]
            sizes.append(_size(part, name))
            targets.append(None if isinstance(part, IterableDataset) else find_targets(part))
            for where, classes in find_class_lists(part):
                lists.setdefault(tuple(classes.items()), (where or f"client {name}", classes))
        self._sizes, self._ends = sizes, np.cumsum(sizes)
        self.users = np.repeat(np.arange(num_clients), sizes)
        known = [part for part in targets if part is not None]
        self.targets = np.concatenate(known) if len(known) == num_clients else None
        self.tensors = _joined(self._parts)
        self.class_lists = list(lists.values())
        self._open: tuple[int, Any] = (-1, None)

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self._ends)

    def count(self, asked: int | None) -> int:
        """Returns the number of clients; refuses another number that was asked for."""
        if asked not in (None, DEFAULT_CLIENTS, self.num_clients):
            raise FederatedError(
                f"Expected `--data.num_clients` to be the number of data sets, {self.num_clients}, got {asked}: leave "
                "it out, or set `--data.partitioner` to split all samples together anew."
            )
        if asked not in (None, self.num_clients):  # the default, which the user may not have chosen
            rank_zero_info(f"Clients: {self.num_clients}, one for each data set.")
        return self.num_clients

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        """Returns a sample by its number, counted over all clients."""
        client = int(np.searchsorted(self._ends, index, side="right"))
        if self._open[0] != client:
            part, size = self._part(client), self._sizes[client]
            read = list(islice(part, size)) if isinstance(part, IterableDataset) else part
            if read is not part and len(read) < size:
                raise FederatedError(
                    f"Expected the stream of client {client} to give {size:,} samples whenever it is read, got "
                    f"{len(read):,}: let its `__iter__` begin anew each time."
                )
            self._open = (client, read)
        return self._open[1][index - int(self._ends[client]) + self._sizes[client]]

    def _part(self, client: int) -> Any:
        return self._parts[client] if self._make is None else self._make(client)


def are_datasets(values: Any) -> bool:
    """Whether something is a list, tuple or dict of data sets, loaders or lists of samples, one for each client."""
    if not isinstance(values, (list, tuple, Mapping)) or not values:
        return False
    parts = values.values() if isinstance(values, Mapping) else values
    return all(
        isinstance(part, (Dataset, DataLoader))
        or hasattr(part, "column_names")
        or (isinstance(part, list) and all(isinstance(sample, (tuple, dict)) for sample in part))  # no sample is that
        for part in parts
    )


def _size(dataset: Any, client: int | str) -> int:
    if not hasattr(type(dataset), "__getitem__"):
        raise FederatedError(f"Expected the data set of client {client} to be a data set, got {name_kind(dataset)}.")
    size = len(dataset) if hasattr(dataset, "__len__") else None
    if size is None and isinstance(dataset, IterableDataset):
        size = sum(1 for _ in islice(dataset, _MOST_COUNTED + 1))
        if size > _MOST_COUNTED:
            raise FederatedError(
                f"Expected {type(dataset).__name__}, the data set of client {client}, to end or to say by `__len__` "
                f"how many samples it has, but it gave more than {_MOST_COUNTED:,}: add `__len__`."
            )
    if not size:
        raise FederatedError(
            f"Expected the data set of client {client} to hold samples and to say by `__len__` how many, got "
            f"{type(dataset).__name__} {'without samples' if size == 0 else 'without `__len__`'}: add it, or leave the "
            "client out."
        )
    return size


def _joined(parts: list[Any]) -> Any:
    """Joins the tensors of all clients; None if some have none, or other names, types or shapes."""
    found = [None if isinstance(part, IterableDataset) else find_tensors(part) for part in parts]
    tensors = [tuple(part.values()) if isinstance(part, dict) else part for part in found if part is not None]
    kinds = {tuple((tensor.dtype, tensor.shape[1:]) for tensor in part) for part in tensors}
    names = {tuple(part) if isinstance(part, dict) else None for part in found}
    if not parts or len(tensors) < len(parts) or len(kinds) > 1 or len(names) > 1 or any(map(find_conversion, parts)):
        return None
    keys, joined = names.pop(), tuple(map(torch.cat, zip(*tensors, strict=True)))
    return joined if keys is None else dict(zip(keys, joined, strict=True))


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
        return len(next(iter(self._columns.values())))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return self._columns[index]
        return {name: values[index] for name, values in self._columns.items()}


def as_dataset(container: Any, option: str, clients: bool = False) -> Any:
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
