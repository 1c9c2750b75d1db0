"""The split that the data bring with them."""

from typing import ClassVar

import numpy as np

from lightning_fed.data.partitioners.base import Owners, Partitioner, Reads, Values
from lightning_fed.errors import FederatedError

__all__ = ["ByUser"]


class ByUser(Partitioner):
    """One client for each user, such as a writer or a speaking role: client i is the i-th user in ascending order.

    It needs the user of each sample: ``Datasets.users``, ``--data.users``, or an attribute ``users`` of the data set.
    The number of clients is the number of users; ``--data.num_clients`` must be null or that number. The seed changes
    nothing.

    Source: natural splits, S. Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018,
    https://arxiv.org/abs/1812.01097.
    """

    reads: ClassVar[Reads] = "users"
    sizes_vary: ClassVar[bool] = False

    def count_clients(self, values: Values, num_clients: int | None) -> int:
        """Returns ``num_clients``, or the number of users if that is None."""
        if num_clients is not None:
            return num_clients
        self._check_values(values, 0 if values is None else len(values))
        return len(np.unique(np.asarray(values)))

    def assign(self, targets: Values, num_samples: int, num_clients: int, generator: np.random.Generator) -> Owners:
        """Numbers the users, which are passed as ``targets``."""
        users, owner = np.unique(np.asarray(targets), return_inverse=True)
        if len(users) != num_clients:
            raise FederatedError(
                f"Expected `--data.num_clients` to be the number of users, {len(users)}, for the partitioner "
                f"{type(self).__name__}, got {num_clients}: set it to null, which takes all users."
            )
        return owner.astype(np.int64, copy=False)
