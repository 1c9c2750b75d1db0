"""Skewed batches: those of clients, of central sets, and of all training data together."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import Self

from lightning_fed.data.batch_sources import BatchSource, JoinedBatches, SetBatches, WrappedSource
from lightning_fed.data.collation import Collate
from lightning_fed.data.skews.base import FeatureSkew
from lightning_fed.data.split import Split

__all__ = ["SkewedBatches", "SkewedRows", "SkewedSource"]


class SkewedRows:
    """What is fixed for each row of one data set: its scheme, and the numbers that a skew draws for it.

    Args:
        skew: A prepared skew.
        draws: The rows' numbers, shape (samples, num_draws).
        schemes: The scheme of all rows, or one for each, shape (samples,).
    """

    def __init__(self, skew: FeatureSkew, draws: Tensor, schemes: int | npt.NDArray[np.int64]) -> None:
        self._skew, self._draws = skew, draws
        self._schemes = schemes if isinstance(schemes, int) else torch.from_numpy(schemes)

    def to(self, device: torch.device | str) -> Self:
        """Moves what is needed to a device; returns itself."""
        self._skew, self._draws = self._skew.on(device), self._draws.to(device)
        if isinstance(self._schemes, Tensor):
            self._schemes = self._schemes.to(device)
        return self

    def show(self, batch: Any, rows: Tensor | slice, scheme: int | None = None) -> Any:
        """Skews a batch of some rows, int64 of shape (B,) or a slice, in their schemes or in another one."""
        schemes = self._schemes if scheme is None else scheme
        return self._skew.apply(batch, schemes if isinstance(schemes, int) else schemes[rows], self._draws[rows])

    def collate(self, collate: Collate, samples: list[Any]) -> Any:
        """Makes a skewed batch of samples that come with their row numbers, in a worker or in the main process."""
        numbers, parts = zip(*samples, strict=True)
        return self.show(collate(list(parts)), torch.tensor(numbers))


class SkewedSource(WrappedSource):
    """Clients' batches, each in the client's scheme; computed on the device of the batches."""

    def __init__(self, source: BatchSource, split: Split, rows: SkewedRows) -> None:
        super().__init__(source)
        self._rows = rows
        self._index, self._offsets = torch.from_numpy(split.index), split.offsets

    def to(self, device: torch.device | str) -> Self:
        self._rows, self._index = self._rows.to(device), self._index.to(device)
        return super().to(device)

    def batches(self, client: int, order: Tensor, seed: int, batch_size: int | None = None) -> Iterator[Any]:
        """Yields the source's batches in the client's scheme."""
        own = self._index[int(self._offsets[client]) : int(self._offsets[client + 1])]
        own, size = own.index_select(0, order.to(own.device)), batch_size or self.batch_size
        for number, batch in enumerate(self.read(client, order, seed, batch_size)):
            yield self._rows.show(batch, own[number * size : (number + 1) * size], scheme=client)

    def gather(self, rows: Tensor, *drawn: Tensor) -> Any:
        """Gathers samples of several clients at once, each in its owner's scheme; see ``TensorSource``."""
        inner: Any = self.inner
        return self._rows.show(inner.gather(rows, *drawn), self._index.index_select(0, rows))


class SkewedBatches(JoinedBatches):
    """The skewed batches of a central set, computed on their device; several views may share the batches."""

    def __init__(self, loader: SetBatches, rows: SkewedRows) -> None:
        super().__init__([loader])
        assert loader.batch_size is not None
        self.batch_size = loader.batch_size
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(super().__iter__()):
            yield self._rows.show(batch, slice(number * self.batch_size, (number + 1) * self.batch_size))

    def to(self, device: torch.device | str) -> Self:
        self._rows.to(device)
        return super().to(device)
