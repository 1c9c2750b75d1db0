"""Splits that no label decides: by size alone, or by user."""

from typing import Any

import numpy as np

from lightning_fed.data.partitioners.base import Owners, Partitioner, Values, deal
from lightning_fed.errors import FederatedError, expect_number

__all__ = ["IID", "ByUser", "PowerLaw", "QuantityDirichlet"]


class IID(Partitioner):
    """A uniformly random split into clients whose sizes differ by at most one sample."""

    sizes_vary = False

    def assign(self, targets: Values, num_samples: int, num_clients: int, generator: np.random.Generator) -> Owners:
        return generator.permutation(np.arange(num_samples, dtype=np.int64) % num_clients)


class QuantityDirichlet(Partitioner):
    """Sizes from a symmetric Dirichlet distribution, independent of labels and inputs.

    Client i of N gets p_i n of all n samples, rounded down or up and drawn at random, with p ~ Dir_N(β). The mean is
    n/N, the variance n² (1/N)(1 − 1/N) / (β N + 1). For small β n/N many clients are empty.

    Source: Q. Li, Y. Diao, Q. Chen, B. He, "Federated Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022
    (quantity skew, with 10 clients and ``min_samples`` 10); β = 0.5 with up to 100 clients, some of them empty, in I.
    Tenison, S. A. Sreeramadas, V. Mugunthan, E. Oyallon, I. Rish, E. Belilovsky, "Gradient Masked Averaging for
    Federated Learning", TMLR 2023, section 5.4.

    Args:
        beta: Concentration β > 0: the smaller, the more unequal the sizes.
        **kwargs: Options of every partitioner.
    """

    def __init__(self, beta: float = 0.5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        expect_number("--data.partitioner.beta", beta, above=0)
        self.beta = beta

    def assign(self, targets: Values, num_samples: int, num_clients: int, generator: np.random.Generator) -> Owners:
        shares = generator.dirichlet(np.full(num_clients, float(self.beta)))
        return generator.permutation(deal(shares, num_samples, generator))


class PowerLaw(Partitioner):
    """Sizes that fall as a power of the client's rank, independent of labels and inputs.

    The client of rank r holds a share proportional to r^(−a) (Zipf's law), rounded down or up; ranks are dealt to the
    clients at random. At a = 1 the largest of 100 clients holds 19 % of the samples and the smallest 0.19 %.

    Source: sizes per client "follow a power law" in T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith,
    "Federated Optimization in Heterogeneous Networks", MLSys 2020, section 5.1, which does not state the law; this one
    is G. K. Zipf, "Human Behavior and the Principle of Least Effort", 1949.

    Args:
        exponent: a > 0: the larger, the more unequal the sizes.
        **kwargs: Options of every partitioner.
    """

    sizes_vary = False

    def __init__(self, exponent: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        expect_number("--data.partitioner.exponent", exponent, above=0)
        self.exponent = exponent

    def assign(self, targets: Values, num_samples: int, num_clients: int, generator: np.random.Generator) -> Owners:
        shares = generator.permutation(np.arange(1, num_clients + 1, dtype=np.float64) ** -float(self.exponent))
        return generator.permutation(deal(shares, num_samples, generator))


class ByUser(Partitioner):
    """One client for each user, such as a writer or a speaking role: client i is the i-th user in ascending order.

    It needs the user of each sample: ``Datasets.users``, ``--data.users``, or an attribute ``users`` of the data set.
    The number of clients is the number of users; ``--data.num_clients`` must be null or that number. The seed changes
    nothing.

    Source: natural splits, S. Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018,
    https://arxiv.org/abs/1812.01097.
    """

    reads = "users"
    sizes_vary = False

    def count_clients(self, values: Values, num_clients: int | None) -> int:
        if num_clients is not None:
            return num_clients
        self._check_values(values, 0 if values is None else len(values))
        return len(np.unique(np.asarray(values)))

    def assign(self, targets: Values, num_samples: int, num_clients: int, generator: np.random.Generator) -> Owners:
        users, owner = np.unique(np.asarray(targets), return_inverse=True)
        if len(users) != num_clients:
            raise FederatedError(
                f"Expected `--data.num_clients` to be the number of users, {len(users)}, for the partitioner "
                f"{type(self).__name__}, got {num_clients}: set it to null, which takes all users."
            )
        return owner.astype(np.int64, copy=False)
