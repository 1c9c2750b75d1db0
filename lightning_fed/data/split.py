"""The result of a partition, one index vector, and how differently labels are distributed over its clients."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_fed.errors import expect

__all__ = ["MOST_PAIRS", "Split", "count_labels", "divergences", "entropies", "label_statistics"]

# All pairs of clients are compared up to this number (that of 100 clients), else a sample of this many. A divergence
# lies in [0, 1], so the mean over the sample has a standard error of at most 0.5 / sqrt(4,950) = 0.007.
MOST_PAIRS = 4_950
# With more classes than this, comparing pairs takes longer than starting a run.
_MOST_CLASSES = 1000
# Numbers held at once while pairs are compared.
_BLOCK = 2**21


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

    def trained_sizes(self, batch_size: int, drop_last: bool) -> npt.NDArray[np.int64]:
        """Returns the samples of each client, shape (clients,), 0 where ``drop_last`` leaves no batch."""
        sizes = self.sizes
        if not drop_last:
            return sizes
        expect(
            sizes.max() >= batch_size,
            f"Expected a client with {batch_size} samples, a whole batch, for `--data.drop_last true`, got at most "
            f"{sizes.max()}: lower `--data.batch_size` or `--data.num_clients`.",
        )
        return np.where(sizes < batch_size, 0, sizes)

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
        counts: npt.NDArray[np.int64] = count_labels(self, targets, num_classes).toarray()
        return counts

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


def count_labels(split: Split, labels: npt.NDArray[np.integer], num_classes: int) -> Any:
    """Counts the samples of each client and class, from a label in [0, num_classes) for each row of the training set.

    Returns:
        A ``scipy.sparse.csr_array`` of shape (clients, classes), as a dense array can be far larger than the data.
    """
    from scipy.sparse import csr_array  # here and below: the import takes as long as a small run

    classes = labels[split.index].astype(np.int64)
    shape = (split.num_clients, num_classes)
    counts = csr_array((np.ones(len(classes), dtype=np.int64), classes, split.offsets), shape, copy=True)
    counts.sum_duplicates()
    return counts


def entropies(counts: Any) -> npt.NDArray[np.float64]:
    """Computes Shannon's entropy ``H(p) = -Σ_c p_c log2 p_c`` of each client's labels in bits.

    Source: C. Shannon, "A Mathematical Theory of Communication", Bell System Technical Journal 1948.

    Args:
        counts: Samples of each client and class, as from ``count_labels``.

    Returns:
        Values in [0, log2 C], shape (clients,); 0 without samples.
    """
    from scipy.special import entr

    client = np.repeat(np.arange(counts.shape[0]), np.diff(counts.indptr))
    shares = counts.data / counts.sum(axis=1)[client]
    return np.asarray(np.bincount(client, entr(shares), counts.shape[0]) / np.log(2))


def divergences(counts: Any, pairs: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Computes the Jensen-Shannon divergence ``H((p + q) / 2) - (H(p) + H(q)) / 2`` between clients' labels in bits.

    Source: J. Lin, "Divergence measures based on the Shannon entropy", IEEE Transactions on Information Theory 1991.

    Args:
        counts: Samples of each client and class, as from ``count_labels``.
        pairs: Ids of clients with samples, shape (pairs, 2).

    Returns:
        Values in [0, 1], shape (pairs,): 0 where both are equal, 1 where they share no class.
    """
    from scipy.special import rel_entr

    def shares(clients: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        table = counts[clients].toarray()
        return np.asarray(table / table.sum(axis=1, keepdims=True))

    size = max(1, _BLOCK // counts.shape[1])
    found = []
    for start in range(0, len(pairs), size):
        p, q = (shares(clients) for clients in pairs[start : start + size].T)
        mixture = (p + q) / 2
        found.append((rel_entr(p, mixture) + rel_entr(q, mixture)).sum(axis=1) / np.log(4))
    return np.concatenate(found).clip(0, 1)


def label_statistics(split: Split, labels: npt.NDArray[np.integer], num_classes: int) -> dict[str, int | float]:
    """Describes how labels are distributed over the clients, each client that holds samples counting the same.

    The arguments are those of ``count_labels``.

    Returns:
        ``classes_per_client_min``, ``_median`` and ``_max``, and ``_mean``, for which clients without samples count
        too; ``label_entropy_mean`` and that of all samples together,
        ``label_entropy_pooled``, in bits; where there are two clients and at most 1000 classes,
        ``label_divergence_mean`` over ``label_divergence_pairs`` pairs of clients.
    """
    from scipy.special import entr

    counts = count_labels(split, labels, num_classes)
    held = np.flatnonzero(split.sizes)
    classes = np.diff(counts.indptr)[held]
    pooled = np.unique(labels[split.index], return_counts=True)[1]  # not of every class: these may be many
    figures: dict[str, int | float] = {
        "classes_per_client_mean": float(classes.sum() / split.num_clients),
        "classes_per_client_min": int(classes.min()),
        "classes_per_client_median": float(np.median(classes)),
        "classes_per_client_max": int(classes.max()),
        "label_entropy_mean": float(entropies(counts)[held].mean()),
        "label_entropy_pooled": float(entr(pooled / pooled.sum()).sum() / np.log(2)),
    }
    if len(held) > 1 and num_classes <= _MOST_CLASSES:
        pairs = held[_pairs(len(held))]
        figures["label_divergence_mean"] = float(divergences(counts, pairs).mean())
        figures["label_divergence_pairs"] = len(pairs)
    return figures


def _pairs(count: int) -> npt.NDArray[np.int64]:
    """Returns all pairs of ``count`` things, or a sample of them, shape (pairs, 2)."""
    if count * (count - 1) // 2 <= MOST_PAIRS:
        return np.stack(np.triu_indices(count, 1), axis=1)
    # Always the same sample, so that the number is the same whenever the split is.
    generator = np.random.default_rng(0)
    first = generator.integers(count, size=MOST_PAIRS)
    return np.stack([first, (first + generator.integers(1, count, size=MOST_PAIRS)) % count], axis=1)
