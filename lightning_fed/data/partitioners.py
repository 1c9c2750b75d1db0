"""Partitioners: which client owns which training sample, as pure functions of (targets, seed)."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from lightning_fed.data.checks import check_count
from lightning_fed.errors import FederatedError
from lightning_fed.seeding import Purpose, numpy_generator_for

__all__ = ["IID", "Partitioner", "Shards"]


class Partitioner(ABC):
    """Base of all partitioners: a subclass says which client owns each sample.

    Attributes:
        needs_targets: Whether the split depends on the targets; data without targets is then refused.
    """

    needs_targets: ClassVar[bool] = False

    @abstractmethod
    def assign(
        self,
        targets: npt.NDArray[Any] | None,
        num_samples: int,
        num_clients: int,
        generator: np.random.Generator,
    ) -> npt.NDArray[np.int64]:
        """Says which client owns each sample.

        Args:
            targets: One target per sample, shape (num_samples,), None when the data has none.
            num_samples: Training samples, at least ``num_clients``.
            num_clients: Clients, at least 1.
            generator: The only randomness to draw from.

        Returns:
            Client ids in [0, num_clients), shape (num_samples,).
        """

    def __call__(
        self, targets: npt.NDArray[Any] | None, num_samples: int, num_clients: int, seed: int
    ) -> list[npt.NDArray[np.int64]]:
        """Splits the samples over the clients.

        Args:
            targets: One target per sample, shape (num_samples,), None when the data has none.
            num_samples: Training samples.
            num_clients: Clients.
            seed: Seed of the split; nothing else is random.

        Returns:
            For each client the ascending indices of its samples, int64; each sample occurs exactly once.

        Raises:
            FederatedError: If the counts are impossible or the targets are missing.
        """
        self._check(targets, num_samples, num_clients)
        generator = numpy_generator_for(seed, Purpose.SPLIT)
        owner = np.asarray(self.assign(targets, num_samples, num_clients, generator))
        self._check_owner(owner, num_samples, num_clients)
        # A stable sort keeps each client's samples in ascending order; slices of one vector cost no copy per client.
        index = np.argsort(owner, kind="stable").astype(np.int64, copy=False)
        ends = np.cumsum(np.bincount(owner, minlength=num_clients)).tolist()
        return [index[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def _check(self, targets: npt.NDArray[Any] | None, num_samples: int, num_clients: int) -> None:
        check_count("--data.num_clients", num_clients)
        if num_clients > num_samples:
            raise FederatedError(
                f"Expected `--data.num_clients` to be at most the number of training samples, {num_samples}, "
                f"got {num_clients}."
            )
        if targets is None and self.needs_targets:
            raise FederatedError(
                f"Expected targets for the partitioner {type(self).__name__}, but the training data has none: set "
                "`--data.targets`, give the data set an attribute `targets`, or choose `--data.partitioner IID`."
            )
        if targets is not None and targets.shape != (num_samples,):
            raise FederatedError(
                f"Expected `--data.targets` to hold one value for each of the {num_samples} training samples, "
                f"got shape {targets.shape}."
            )

    def _check_owner(self, owner: npt.NDArray[Any], num_samples: int, num_clients: int) -> None:
        integers = np.issubdtype(owner.dtype, np.integer)
        if owner.shape != (num_samples,) or not integers or owner.min() < 0 or owner.max() >= num_clients:
            raise FederatedError(
                f"Expected `--data.partitioner` {type(self).__name__} to assign a client id in [0, {num_clients}) to "
                f"each of the {num_samples} samples, got {owner.dtype} values of shape {owner.shape}."
            )


class IID(Partitioner):
    """A uniformly random split into clients whose sizes differ by at most one sample."""

    def assign(
        self,
        targets: npt.NDArray[Any] | None,
        num_samples: int,
        num_clients: int,
        generator: np.random.Generator,
    ) -> npt.NDArray[np.int64]:
        """Deals the samples out in random order."""
        return generator.permutation(np.arange(num_samples, dtype=np.int64) % num_clients)


class Shards(Partitioner):
    """The label split of McMahan 2017 ("Communication-Efficient Learning of Deep Networks from Decentralized Data").

    The samples are sorted by label, cut into ``classes_per_client * num_clients`` shards whose sizes differ by at most
    one, and each client is dealt ``classes_per_client`` shards at random. A client whose shards share a label holds
    fewer classes, one whose shard lies across a boundary holds more.

    Args:
        classes_per_client: Shards dealt to each client, at most the number of classes.
    """

    needs_targets: ClassVar[bool] = True

    def __init__(self, classes_per_client: int = 2) -> None:
        check_count("--data.partitioner.classes_per_client", classes_per_client)
        self.classes_per_client = classes_per_client

    def assign(
        self,
        targets: npt.NDArray[Any] | None,
        num_samples: int,
        num_clients: int,
        generator: np.random.Generator,
    ) -> npt.NDArray[np.int64]:
        """Sorts by label after a shuffle, cuts into shards, deals the shards.

        Raises:
            FederatedError: If there are fewer classes than ``classes_per_client`` or fewer samples than shards.
        """
        labels = np.asarray(targets)
        num_shards = self.classes_per_client * num_clients
        self._check_shards(len(np.unique(labels)), num_samples, num_shards)
        shuffled = generator.permutation(num_samples)
        by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
        owner_of_shard = generator.permutation(np.arange(num_shards, dtype=np.int64) // self.classes_per_client)
        owner = np.empty(num_samples, dtype=np.int64)
        owner[by_label] = owner_of_shard[np.arange(num_samples) * num_shards // num_samples]
        return owner

    def _check_shards(self, num_classes: int, num_samples: int, num_shards: int) -> None:
        if self.classes_per_client > num_classes:
            raise FederatedError(
                f"Expected `--data.partitioner.classes_per_client` to be at most the number of classes, {num_classes}, "
                f"got {self.classes_per_client}."
            )
        if num_shards > num_samples:
            raise FederatedError(
                f"Expected at least one sample for each of the {num_shards} shards, got {num_samples} samples: lower "
                "`--data.num_clients` or `--data.partitioner.classes_per_client`."
            )
