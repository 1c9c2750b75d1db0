"""Batches of one client at a time, and of central sets, without a data loader or a copy of the data per client."""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import Self

from lightning_fed.core.devices import data_to
from lightning_fed.core.user_code import Held
from lightning_fed.data.collation import CheckedCollate, Loading, Requests, SeededReads, close_workers
from lightning_fed.data.inspection import AnyDataset, Conversion, Tensors, length, map_tensors
from lightning_fed.data.split import Split
from lightning_fed.errors import FederatedError

__all__ = [
    "BatchSource", "EvalBatches", "EvalLoader", "EvalLoaders", "JoinedBatches", "LoaderSource", "SetBatches",
    "TensorSource", "WrappedSource", "map_inputs", "num_samples",
]  # fmt: skip


@runtime_checkable
class BatchSource(Protocol):
    """Where the local loop gets a client's batches from.

    Attributes:
        sizes: Samples of each client, shape (clients,), int64.
        batch_size: Samples per batch.
        reads_are_seeded: Whether reading a sample may be random, so that ``seed`` matters.

    A source may have two further attributes. With ``drop_last`` true, short last batches of local training are left
    out: the order of an epoch is cut to whole batches, and clients without one have size 0. With ``order_device`` the
    source gets the orders of local training on that device. ``close`` is called at the end, and before the clients of
    a round train with True: what reads for the source ends, or what cannot be sure that the data are the same.
    """

    sizes: npt.NDArray[np.int64]
    batch_size: int
    reads_are_seeded: bool

    def to(self, device: torch.device | str) -> Self:
        """Makes the batches live on a device; returns itself."""

    def batches(self, client: int, order: Tensor, seed: int, batch_size: int | None = None) -> Iterator[Any]:
        """Yields a client's batches; the last one may be short.

        Args:
            client: Client id.
            order: A permutation of range(s_i), shape (s_i,), int64, on the CPU; with ``drop_last`` only its start.
            seed: Seed for whatever is random in reading a sample.
            batch_size: Another number of samples per batch, for passes without training.
        """


class TensorSource:
    """Batches gathered from tensors that live on the device; a client is a slice of one index vector.

    Args:
        tensors: A tuple or dict of tensors whose first dimension counts the samples.
        split: Which rows each client owns.
        batch_size: Samples per batch.
        convert: Turns a batch of stored inputs (the first tensor) into inputs; None if they are inputs already.
        drop_last: Whether local training leaves out short last batches.
    """

    reads_are_seeded = False

    def __init__(
        self,
        tensors: Tensors,
        split: Split,
        batch_size: int,
        convert: Conversion | None = None,
        drop_last: bool = False,
    ) -> None:
        self.sizes = split.trained_sizes(batch_size, drop_last)
        self.batch_size, self.drop_last = batch_size, drop_last
        self._tensors, self._convert = tensors, convert
        self._index, self._offsets = torch.from_numpy(split.index), split.offsets

    def to(self, device: torch.device | str) -> Self:
        """Moves the data and the index lists to a device, once."""
        self._tensors = map_tensors(self._tensors, lambda tensor: data_to(tensor, device))
        self._index = self._index.to(device)
        return self

    @property
    def device(self) -> torch.device:
        """Where the data live."""
        return self._index.device

    @property
    def order_device(self) -> torch.device:
        """Where this source expects orders: the CPU for a subclass, which may read differently."""
        return self.device if type(self) is TensorSource else torch.device("cpu")

    def batches(self, client: int, order: Tensor, seed: int, batch_size: int | None = None) -> Iterator[Any]:
        """Yields lists of tensors (dicts for dict data), as ``default_collate`` builds them; ``seed`` is unused."""
        rows = self._index[int(self._offsets[client]) : int(self._offsets[client + 1])]
        rows = rows.index_select(0, order.to(rows.device))
        batch_size = batch_size or self.batch_size
        for start in range(0, len(order), batch_size):
            yield self._select(rows[start : start + batch_size])

    def _select(self, rows: Tensor) -> Any:
        return _batch(self._tensors, lambda tensor: tensor.index_select(0, rows), self._convert)

    def plan(self, client: int, order: Tensor, seed: int) -> tuple[Tensor, ...]:
        """Returns the arguments of ``gather`` for a client's epoch: a number for each sample, on the CPU.

        They are as in ``batches``; ``order`` is changed in place.
        """
        return (order.add_(int(self._offsets[client])),)

    def gather(self, rows: Tensor) -> Any:
        """Gathers samples of several clients at once, with the values that ``batches`` yields.

        Args:
            rows: Their numbers from ``plan``, shape (B,), on the device.

        Returns:
            A list or dict of tensors of shape (B, ...).
        """
        return self._select(self._index.index_select(0, rows))


class LoaderSource:
    """Batches of any map-style data set, through one data loader that lives as long as the source.

    What is random in reading a sample depends only on the seed and the batch's number, not on earlier clients or the
    number of workers. Workers live on from client to client; they start anew, with the data set as it is then, once it
    has changed, or in each round if it holds too much to be compared. You can read only one client's batches at a time.
    """

    reads_are_seeded = True

    def __init__(self, dataset: AnyDataset, split: Split, loading: Loading) -> None:
        self.batch_size, self.drop_last = loading.batch_size, loading.drop_last
        self.sizes = split.trained_sizes(self.batch_size, self.drop_last)
        self._dataset, self._split, self._loading = dataset, split, loading
        self._collate = CheckedCollate(loading.collate_fn)
        self._device = torch.device("cpu")
        self._requests = Requests()
        self._loader: DataLoader[Any] | None = None
        self._held: Held | None = None

    def to(self, device: torch.device | str) -> Self:
        """Makes batches arrive on a device."""
        if torch.device(device) != self._device:
            self.close()
            self._device = torch.device(device)
        return self

    def close(self, unsure: bool = False) -> None:
        """Ends the workers, or only those whose data set may have changed unseen; the next batches start new ones."""
        if not unsure or (self._held is not None and not self._held.whole):
            close_workers(self._loader)
            self._loader = self._held = None

    def batches(self, client: int, order: Tensor, seed: int, batch_size: int | None = None) -> Iterator[Any]:
        """Yields what ``collate_fn`` makes from the client's samples in this order."""
        if self._held is not None and self._held != Held(self._dataset, self._collate):
            self.close()
        if self._loader is None:
            self._loader = self._build_loader()
            self._held = Held(self._dataset, self._collate) if self._loading.num_workers else None
        start, end = self._split.offsets[client], self._split.offsets[client + 1]
        rows = self._split.index[start:end][order.numpy()].tolist()
        size = batch_size or self.batch_size
        chunks = [rows[first : first + size] for first in range(0, len(rows), size)]
        self._requests.batches = [(seed, number, chunk) for number, chunk in enumerate(chunks)]
        try:
            for batch in self._loader:
                yield batch if self._device.type == "cpu" else move_data_to_device(batch, self._device)
        except FederatedError as error:  # a worker's message comes inside a traceback
            raise FederatedError(str(error).rsplit("FederatedError: ", 1)[-1].strip()) from error

    def _build_loader(self) -> DataLoader[Any]:
        return DataLoader(
            SeededReads(self._dataset, self._collate),
            batch_sampler=self._requests,  # type: ignore[arg-type]  # batches carry a seed besides row numbers
            collate_fn=self._collate,
            persistent_workers=self._loading.num_workers > 0,
            pin_memory=self._device.type == "cuda",
            # A loader without its own generator draws from torch's global stream in each pass.
            generator=torch.Generator(),
            **self._loading.workers,
        )


class WrappedSource:
    """Base of sources that change the batches of another source, ``inner``; a subclass writes ``batches``."""

    def __init__(self, source: BatchSource) -> None:
        self.inner = source
        self.sizes = source.sizes
        self.batch_size = source.batch_size
        self.reads_are_seeded = source.reads_are_seeded
        self.drop_last = getattr(source, "drop_last", False)

    def to(self, device: torch.device | str) -> Self:
        """Makes the batches live on a device; returns itself."""
        self.inner = self.inner.to(device)
        return self

    @property
    def order_device(self) -> torch.device:
        """Where the other source expects orders."""
        device: torch.device = getattr(self.inner, "order_device", torch.device("cpu"))
        return device

    def close(self, unsure: bool = False) -> None:
        """Tells the other source; see ``BatchSource``."""
        getattr(self.inner, "close", lambda *_: None)(unsure)

    def plan(self, client: int, order: Tensor, seed: int) -> tuple[Tensor, ...]:
        """Returns the arguments of ``gather`` for an epoch, if both sources have it; see ``TensorSource``."""
        inner: Any = self.inner
        return tuple(inner.plan(client, order, seed))

    def read(self, client: int, order: Tensor, seed: int, batch_size: int | None) -> Iterator[Any]:
        """Yields the other source's batches; a user's own source need not take the argument ``batch_size``."""
        size = {} if batch_size is None else {"batch_size": batch_size}
        return self.inner.batches(client, order, seed, **size)


class EvalLoader(Protocol):
    """The batches of a central set: a data loader, or an object that also has ``num_samples`` and ``to(device)``."""

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...


# Where there is no such set, Lightning expects an empty list, not None.
EvalLoaders: TypeAlias = EvalLoader | dict[str, EvalLoader] | list[EvalLoader]


class EvalBatches:
    """Consecutive slices of tensors, for evaluation: no shuffling, no workers, no copy.

    The arguments are those of ``TensorSource``; the last batch may be short.
    """

    def __init__(self, tensors: Tensors, batch_size: int, convert: Conversion | None = None) -> None:
        self.batch_size, self._tensors, self._convert = batch_size, tensors, convert
        self.num_samples = len(next(iter(tensors.values())) if isinstance(tensors, dict) else tensors[0])

    def __len__(self) -> int:
        return -(-self.num_samples // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        """Yields lists of tensors, or dicts."""
        for start in range(0, self.num_samples, self.batch_size):
            yield _batch(self._tensors, itemgetter(slice(start, start + self.batch_size)), self._convert)

    def to(self, device: torch.device | str) -> Self:
        """Moves the data to a device, once; returns itself."""
        self._tensors = map_tensors(self._tensors, lambda tensor: data_to(tensor, device))
        return self


SetBatches: TypeAlias = EvalBatches | DataLoader[Any]


class JoinedBatches:
    """The batches of several sets, one set after the other; the last batch of each may be short."""

    def __init__(self, loaders: Sequence[EvalLoader]) -> None:
        self._loaders = list(loaders)
        self._device: torch.device | None = None

    @property
    def num_samples(self) -> int:
        """Samples in all sets together."""
        return sum(map(num_samples, self._loaders))

    def __len__(self) -> int:
        return sum(map(len, self._loaders))

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches of the sets as they are."""
        for loader in self._loaders:
            for batch in loader:
                yield move_data_to_device(batch, self._device) if self._device is not None else batch

    def to(self, device: torch.device | str) -> Self:
        """Makes batches arrive on a device; returns itself."""
        self._device = torch.device(device)
        for loader in self._loaders:
            if hasattr(loader, "to"):  # a data loader's batches move one by one
                loader.to(device)
        return self


def num_samples(loader: Any) -> int:
    """Returns the number of samples of a central set, also if a data loader reads it."""
    return int(loader.num_samples) if hasattr(loader, "num_samples") else length(loader.dataset, "--data")


def map_inputs(batch: Any, function: Conversion) -> Any:
    """Applies a function to the inputs of a batch, its first part, and leaves the other parts as they are.

    A list or tuple becomes a list; a dict, a named tuple and a tensor stay what they are.
    """
    if isinstance(batch, Mapping):
        name = next(iter(batch))
        return {**batch, name: function(batch[name])}
    if isinstance(batch, Tensor):
        return function(batch)
    if hasattr(batch, "_replace"):  # a named tuple
        return batch._replace(**{batch._fields[0]: function(batch[0])})
    inputs, *others = batch
    return [function(inputs), *others]


def _batch(tensors: Tensors, take: Conversion, convert: Conversion | None) -> Any:
    """Takes a part of every tensor and converts the first to inputs; a list, as from ``default_collate``, or a dict."""
    parts = map_tensors(tensors, take)
    batch = parts if isinstance(parts, dict) else list(parts)
    return batch if convert is None else map_inputs(batch, convert)
