"""The split without skew."""

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from lightning_fed.data.partitioners.base import Partitioner

__all__ = ["IID"]


class IID(Partitioner):
    """A uniformly random split into clients whose sizes differ by at most one sample."""

    sizes_vary: ClassVar[bool] = False

    def assign(
        self,
        targets: npt.NDArray[Any] | None,
        num_samples: int,
        num_clients: int,
        generator: np.random.Generator,
    ) -> npt.NDArray[np.int64]:
        """Deals the samples out in random order."""
        return generator.permutation(np.arange(num_samples, dtype=np.int64) % num_clients)
