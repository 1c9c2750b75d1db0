"""The result of a partition: one index vector, client after client."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_fed.data.partitioners import Partitioner

__all__ = ["Split"]


@dataclass(frozen=True)
class Split:
    """Which rows of the training set each client owns.

    Attributes:
        index: Row numbers, client after client, shape (samples,), int64.
        offsets: Where each client starts in ``index``, shape (clients + 1,), int64.
    """

    index: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    @classmethod
    def of(cls, clients: Sequence[npt.NDArray[Any]]) -> "Split":
        """Joins one index array per client."""
        sizes = np.fromiter(map(len, clients), dtype=np.int64, count=len(clients))
        return cls(np.concatenate(clients).astype(np.int64, copy=False), np.concatenate([[0], np.cumsum(sizes)]))

    @classmethod
    def by(
        cls,
        partitioner: Partitioner,
        values: npt.NDArray[Any] | None,
        rows: npt.NDArray[np.int64],
        num_clients: int,
        seed: int,
    ) -> "Split":
        """Partitions some rows of the training set.

        Args:
            partitioner: Says which client gets which row.
            values: What the partitioner reads: one target or user per row of the whole training set, or None.
            rows: The rows to hand out, shape (samples,).
            num_clients: Number of clients.
            seed: Seed of the split.
        """
        clients = partitioner(None if values is None else values[rows], len(rows), num_clients, seed)
        split = cls.of(clients)
        return cls(rows[split.index], split.offsets)

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Samples of each client, shape (clients,)."""
        return np.diff(self.offsets)

    @property
    def owners(self) -> npt.NDArray[np.int64]:
        """The client of each entry of ``index``, shape (samples,)."""
        return np.repeat(np.arange(self.num_clients), self.sizes)

    def keep(self, entries: npt.NDArray[np.bool_], clients: npt.NDArray[np.bool_] | None = None) -> "Split":
        """Returns the split without some rows or clients.

        Args:
            entries: Which entries of ``index`` stay, shape (samples,).
            clients: Which clients stay, renumbered in the same order; shape (clients,). All if not given.
        """
        sizes = np.bincount(self.owners[entries], minlength=self.num_clients)
        sizes = sizes if clients is None else sizes[clients]
        return Split(self.index[entries], np.concatenate([[0], np.cumsum(sizes)]))

    def hash(self) -> str:
        """SHA-256 over offsets and indices as little-endian int64, in hexadecimal."""
        digest = hashlib.sha256(self.offsets.astype("<i8").tobytes())
        digest.update(self.index.astype("<i8").tobytes())
        return digest.hexdigest()

    def class_counts(self, targets: npt.NDArray[Any], num_classes: int) -> npt.NDArray[np.int64]:
        """Counts the samples of each client and class, shape (clients, num_classes)."""
        cells = self.owners * num_classes + targets[self.index]
        counts = np.bincount(cells, minlength=self.num_clients * num_classes)
        return counts.reshape(self.num_clients, num_classes)

    def summary(self) -> dict[str, int | float | str]:
        """Describes the split in a few numbers."""
        sizes = self.sizes
        return {
            "clients": self.num_clients,
            "clients_empty": int((sizes == 0).sum()),
            "samples": len(self.index),
            "samples_per_client_min": int(sizes.min()),
            "samples_per_client_median": float(np.median(sizes)),
            "samples_per_client_max": int(sizes.max()),
        }
