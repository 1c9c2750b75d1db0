"""The base of masks that go over a server rule."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from lightning_fed.reduction import Need, ReducedUpdate

__all__ = ["Mask"]


class Mask(ABC):
    """Scales each coordinate of the server's step: w <- w + η_g m ⊙ u.

    A subclass names what it needs of the cohort in ``needs`` and computes m from it. Masks act on trainable parameters
    only, never on buffers.
    """

    needs: Need = Need.NOTHING

    def prepare(self, sizes: Sequence[int]) -> None:
        """Called before ``compute`` with the number of elements of each parameter, in the order of the flat vector."""
        self.sizes = tuple(sizes)

    @abstractmethod
    def compute(self, update: ReducedUpdate) -> Tensor:
        """Computes the mask.

        Args:
            update: The cohort's reduced update, holding what ``needs`` asked for.

        Returns:
            m, shape (d,), in the dtype of the global vector.
        """

    def diagnose(self, update: ReducedUpdate, mask: Tensor) -> dict[str, Tensor]:
        """Returns scalars to log for the round, by name."""
        return {"mask/mean": mask.mean()}
