"""Splits by label without a distribution: sorted shards, or exactly k classes for every client."""

from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_fed.data.partitioners.base import Owners, Partitioner, Values, by_class, class_codes
from lightning_fed.errors import FederatedError, expect, expect_count

__all__ = ["ExactClasses", "Shards"]


class Shards(Partitioner):
    """The label split of McMahan 2017 ("Communication-Efficient Learning of Deep Networks from Decentralized Data").

    The samples are sorted by label, cut into ``classes_per_client * num_clients`` shards whose sizes differ by at most
    one, and each client is dealt ``classes_per_client`` shards at random. A client whose shards share a label holds
    fewer classes, one whose shard lies across a boundary holds more.

    Args:
        classes_per_client: Shards dealt to each client, at most the number of classes.
        **kwargs: Options of every partitioner.
    """

    reads = "targets"
    sizes_vary = False

    def __init__(self, classes_per_client: int = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        expect_count("--data.partitioner.classes_per_client", classes_per_client)
        self.classes_per_client = classes_per_client

    def assign(self, targets: Values, num_samples: int, num_clients: int, generator: np.random.Generator) -> Owners:
        labels = np.asarray(targets)
        num_shards = self.classes_per_client * num_clients
        _expect_classes(self.classes_per_client, len(np.unique(labels)))
        expect(
            num_shards <= num_samples,
            f"Expected at least one sample for each of the {num_shards} shards, got {num_samples} samples: lower "
            "`--data.num_clients` or `--data.partitioner.classes_per_client`.",
        )
        shuffled = generator.permutation(num_samples)
        by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
        owner_of_shard = generator.permutation(np.arange(num_shards, dtype=np.int64) // self.classes_per_client)
        owner = np.empty(num_samples, dtype=np.int64)
        owner[by_label] = owner_of_shard[np.arange(num_samples) * num_shards // num_samples]
        return owner


class ExactClasses(Partitioner):
    """Every client holds exactly k classes, in parts that are as equal as the classes allow.

    The number of clients that hold a class is proportional to its size; these numbers sum to N k for N clients. A class
    is cut into one part for each holder, and the sizes of its parts differ by at most one. With balanced classes and C
    dividing N k all clients are of equal size up to k samples; with N k = C no two clients share a class. Who holds
    which classes is random: a first arrangement, with k distinct classes for each client, is shuffled by exchanges
    between pairs of clients (A. R. Rao, R. Jana, S. Bandyopadhyay, "A Markov chain Monte Carlo method for generating
    random (0,1)-matrices with given marginals", Sankhyā 1996).

    Source: Y. Dandi, L. Barba, M. Jaggi, "Implicit Gradient Alignment in Distributed and Federated Learning", AAAI
    2022: k = 1 for EMNIST (47 clients, 47 classes), k = 2 and disjoint for CIFAR-100 (50 clients). ``Shards`` does not
    fix the number of classes of a client; this does.

    Args:
        classes_per_client: k, at most the number of classes; N k must be at least that number.
        **kwargs: Options of every partitioner.
    """

    reads = "targets"
    sizes_vary = False

    def __init__(self, classes_per_client: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        expect_count("--data.partitioner.classes_per_client", classes_per_client)
        self.classes_per_client = classes_per_client

    def assign(self, targets: Values, num_samples: int, num_clients: int, generator: np.random.Generator) -> Owners:
        counts, codes = class_codes(targets)
        self._check_counts(counts, num_clients)
        holders = _holders(counts, num_clients, num_clients * self.classes_per_client)
        held = _arrange(holders, num_clients, generator)
        # Parts go to the holders in random order, as the first parts of a class may be larger than the last.
        client_of_part = by_class(held.ravel(), generator) // self.classes_per_client
        label = np.repeat(np.arange(len(counts)), counts)
        rank = np.arange(num_samples) - (np.cumsum(counts) - counts)[label]
        part = (np.cumsum(holders) - holders)[label] + rank * holders[label] // counts[label]
        owner = np.empty(num_samples, dtype=np.int64)
        owner[by_class(codes, generator)] = client_of_part[part]
        return owner

    def _check_counts(self, counts: npt.NDArray[np.int64], num_clients: int) -> None:
        num_classes, num_parts = len(counts), num_clients * self.classes_per_client
        option = "`--data.partitioner.classes_per_client`"
        _expect_classes(self.classes_per_client, num_classes)
        if num_parts < num_classes:
            raise FederatedError(
                f"Expected `--data.num_clients` times {option} to be at least the number of classes, {num_classes}, so "
                f"that each has a client, got {num_clients} times {self.classes_per_client}."
            )
        if np.minimum(counts, num_clients).sum() < num_parts:
            raise FederatedError(
                f"Expected enough samples for {num_clients} clients of {self.classes_per_client} classes each, got "
                f"{counts.sum()} samples in {num_classes} classes: lower `--data.num_clients` or {option}."
            )


def _expect_classes(classes_per_client: int, num_classes: int) -> None:
    expect(
        classes_per_client <= num_classes,
        f"Expected `--data.partitioner.classes_per_client` to be at most the number of classes, {num_classes}, got "
        f"{classes_per_client}.",
    )


def _holders(counts: npt.NDArray[np.int64], num_clients: int, num_parts: int) -> npt.NDArray[np.int64]:
    """Returns the number of parts of each class, in proportion to its size; at least 1, at most N and its size.

    Webster's method: round(t m) parts for a class of m samples, with t such that they sum up to ``num_parts``.
    """
    most = np.minimum(counts, num_clients)

    def rounded(t: float) -> npt.NDArray[np.int64]:
        return np.asarray(np.clip(np.floor(t * counts + 0.5), 1, most), dtype=np.int64)

    low, high = 0.0, float(num_parts + 1)
    for _ in range(100):  # more halvings than doubles can tell apart
        middle = (low + high) / 2
        low, high = (middle, high) if rounded(middle).sum() <= num_parts else (low, middle)
    holders = rounded(low)
    # Classes of equal size get their next part at the same t; the parts that are left go to the next classes in turn.
    turn = np.where(holders < most, (holders + 0.5) / counts, np.inf)
    holders[np.argsort(turn, kind="stable")[: num_parts - holders.sum()]] += 1
    return holders


def _arrange(holders: npt.NDArray[np.int64], num_clients: int, generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draws which classes each client holds, shape (num_clients, k), all distinct within a client."""
    classes = generator.permutation(len(holders))
    # Class after class down the columns: no class is longer than a column, so no client gets it twice.
    held = np.repeat(classes, holders[classes]).reshape(-1, num_clients).T[generator.permutation(num_clients)]
    k, half = held.shape[1], num_clients // 2
    # Each round offers every client one exchange. A deck of N k cards needs (N k / 2) log(N k) random transpositions;
    # here it is half as many again, since not all are allowed.
    rounds = int(k * np.log2(2 * num_clients * k)) if 1 < k < len(holders) else 0
    for _ in range(rounds):
        order = generator.permutation(num_clients)
        one, other = order[:half], order[half : 2 * half]
        places = generator.integers(k, size=(2, half))
        given, taken = held[one, places[0]], held[other, places[1]]
        fits = (held[one] != taken[:, None]).all(axis=1) & (held[other] != given[:, None]).all(axis=1)
        held[one[fits], places[0][fits]] = taken[fits]
        held[other[fits], places[1][fits]] = given[fits]
    return np.asarray(held)
