"""How differently the labels are distributed over the clients: classes, entropy and divergence."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_fed.data.split import Split

__all__ = ["MOST_PAIRS", "LabelCounts", "divergence", "entropy", "label_statistics"]

# Up to this many pairs of clients (100 clients have as many) all of them are compared, else a sample of this size. A
# divergence lies in [0, 1], so the mean over the sample has a standard error of at most 0.5 / sqrt(4,950) = 0.007.
MOST_PAIRS = 4_950
# With more classes than this, pairs take longer to compare than a run to start.
_MOST_CLASSES = 1000
# Numbers held at once while pairs are compared.
_BLOCK = 2**21


def entropy(shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Computes Shannon's entropy ``H(p) = -Σ_c p_c log2 p_c`` in bits.

    Source: C. Shannon, "A Mathematical Theory of Communication", Bell System Technical Journal 1948.

    Args:
        shares: Distributions over C classes, shape (..., C), float64.

    Returns:
        Values in [0, log2 C], shape (...).
    """
    logarithms = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    return np.asarray(-(shares * logarithms).sum(axis=-1)) + 0.0  # no minus zero


def divergence(p: npt.NDArray[np.float64], q: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Computes the Jensen-Shannon divergence ``H((p + q) / 2) - (H(p) + H(q)) / 2`` in bits.

    Source: J. Lin, "Divergence measures based on the Shannon entropy", IEEE Transactions on Information Theory 1991.

    Args:
        p: Distributions over C classes, shape (..., C), float64.
        q: Others, same shape.

    Returns:
        Values in [0, 1], shape (...): 0 where both are equal, 1 where they share no class.
    """
    mixed = entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2
    return np.asarray(mixed.clip(0, 1))


@dataclass(frozen=True)
class LabelCounts:
    """How many samples of each class each client holds: the pairs of client and class that occur, sorted.

    A table of clients × classes can be far larger than the data.

    Attributes:
        starts: Where each client starts, shape (clients + 1,), int64.
        classes: Class of each pair, shape (pairs,), int64.
        counts: Its samples, shape (pairs,), int64.
        num_classes: Number of classes.
    """

    starts: npt.NDArray[np.int64]
    classes: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    num_classes: int

    @classmethod
    def of(cls, split: Split, labels: npt.NDArray[np.integer], num_classes: int) -> "LabelCounts":
        """Counts.

        Args:
            split: Which rows of the training set each client owns.
            labels: A label for each row of the training set, in [0, num_classes).
            num_classes: Number of classes.
        """
        cells, counts = np.unique(split.owners * num_classes + labels[split.index], return_counts=True)
        starts = np.searchsorted(cells, np.arange(split.num_clients + 1) * num_classes)
        return cls(starts, cells % num_classes, counts, num_classes)

    @property
    def classes_per_client(self) -> npt.NDArray[np.int64]:
        """Number of classes that each client holds, shape (clients,)."""
        return np.diff(self.starts)

    def pooled(self) -> npt.NDArray[np.float64]:
        """Computes the distribution of the labels of all clients together, shape (num_classes,)."""
        totals = np.bincount(self.classes, self.counts, self.num_classes)
        return np.asarray(totals / max(totals.sum(), 1))

    def shares(self, clients: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Computes the distribution of some clients' labels, shape (len(clients), num_classes); 0 without any."""
        lengths = self.starts[clients + 1] - self.starts[clients]
        row = np.repeat(np.arange(len(clients)), lengths)
        first = np.repeat(self.starts[clients] - (np.cumsum(lengths) - lengths), lengths)
        cells = np.arange(len(row)) + first
        table = np.zeros((len(clients), self.num_classes))
        table[row, self.classes[cells]] = self.counts[cells]
        return np.asarray(table / np.maximum(table.sum(axis=1, keepdims=True), 1))

    def entropies(self) -> npt.NDArray[np.float64]:
        """Computes the entropy of each client's labels in bits, shape (clients,); 0 without samples."""
        lengths = self.classes_per_client
        client = np.repeat(np.arange(len(lengths)), lengths)
        shares = self.counts / np.bincount(client, self.counts, len(lengths))[client]
        return np.asarray(np.bincount(client, -shares * np.log2(shares), len(lengths)) + 0.0)

    def divergences(self, pairs: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Computes the divergence between the labels of pairs of clients.

        Args:
            pairs: Client ids, shape (pairs, 2).

        Returns:
            Values in [0, 1], shape (pairs,).
        """
        size = max(1, _BLOCK // self.num_classes)
        blocks = [pairs[start : start + size] for start in range(0, len(pairs), size)]
        return np.concatenate([divergence(self.shares(block[:, 0]), self.shares(block[:, 1])) for block in blocks])


def label_statistics(counts: LabelCounts) -> dict[str, int | float]:
    """Describes how labels are distributed over the clients that hold samples, each client counting the same.

    Returns:
        ``classes_per_client_min``, ``_median`` and ``_max``; ``label_entropy_mean`` and that of all samples together,
        ``label_entropy_pooled``, in bits; where there are two clients and at most 1000 classes,
        ``label_divergence_mean`` over ``label_divergence_pairs`` pairs of clients.
    """
    held = np.flatnonzero(counts.classes_per_client)
    classes = counts.classes_per_client[held]
    figures: dict[str, int | float] = {
        "classes_per_client_min": int(classes.min()),
        "classes_per_client_median": float(np.median(classes)),
        "classes_per_client_max": int(classes.max()),
        "label_entropy_mean": float(counts.entropies()[held].mean()),
        "label_entropy_pooled": float(entropy(counts.pooled())),
    }
    if len(held) > 1 and counts.num_classes <= _MOST_CLASSES:
        pairs = held[_pairs(len(held))]
        figures["label_divergence_mean"] = float(counts.divergences(pairs).mean())
        figures["label_divergence_pairs"] = len(pairs)
    return figures


def _pairs(count: int) -> npt.NDArray[np.int64]:
    """Returns all pairs of ``count`` things, or a sample of them, shape (pairs, 2)."""
    if count * (count - 1) // 2 <= MOST_PAIRS:
        return np.stack(np.triu_indices(count, 1), axis=1)
    # Always the same sample: the number describes a split, and must not differ between two looks at it.
    generator = np.random.default_rng(0)
    first = generator.integers(count, size=MOST_PAIRS)
    return np.stack([first, (first + generator.integers(1, count, size=MOST_PAIRS)) % count], axis=1)
