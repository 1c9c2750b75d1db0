"""The label split of the first paper on federated averaging."""

from typing import Any, ClassVar

import numpy as np

from lightning_fed.data.partitioners.base import Owners, Partitioner, Reads, Values
from lightning_fed.errors import FederatedError, expect_count

__all__ = ["Shards"]


class Shards(Partitioner):
    """The label split of McMahan 2017 ("Communication-Efficient Learning of Deep Networks from Decentralized Data").

    The samples are sorted by label, cut into ``classes_per_client * num_clients`` shards whose sizes differ by at most
    one, and each client is dealt ``classes_per_client`` shards at random. A client whose shards share a label holds
    fewer classes, one whose shard lies across a boundary holds more.

    Args:
        classes_per_client: Shards dealt to each client, at most the number of classes.
        **kwargs: Options of every partitioner.
    """

    reads: ClassVar[Reads] = "targets"
    sizes_vary: ClassVar[bool] = False

    def __init__(self, classes_per_client: int = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        expect_count("--data.partitioner.classes_per_client", classes_per_client)
        self.classes_per_client = classes_per_client

    def assign(self, targets: Values, num_samples: int, num_clients: int, generator: np.random.Generator) -> Owners:
        """Sorts by label after a shuffle, cuts into shards, deals the shards."""
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
