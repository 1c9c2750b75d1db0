"""A mask of the magnitudes in which the clients agree."""

from torch import Tensor

from lightning_fed.functional.masks import magnitude_agreement, magnitude_agreement_mask, vote_threshold
from lightning_fed.masks.base import Mask
from lightning_fed.reduction import Need, ReducedUpdate

__all__ = ["MagnitudeAgreement"]


class MagnitudeAgreement(Mask):
    """Lets through coordinates on which the clients' updates do not cancel each other.

    A = |Σ_i δ_i| / Σ_i |δ_i| (0/0 = 0) over the clients that entered the round, unweighted; m = 1 where A >= τ, else A
    (soft) or 0 (binary). The votes of ``SignAgreement``, each as large as the client's step: the paper on gradient
    masked averaging (Tenison et al., TMLR 2023) leaves magnitudes to future work. τ = 0 is the unmasked rule, bit for
    bit; a client whose updates are larger counts for more.

    Args:
        threshold: τ in [0, 1].
        binary: Whether coordinates below the threshold are dropped instead of scaled by A.

    Raises:
        FederatedError: If the threshold is outside [0, 1].
    """

    needs = Need.SUM | Need.ABS_SUM

    def __init__(self, threshold: float = 0.4, binary: bool = False) -> None:
        vote_threshold(threshold, 1)
        self.threshold = threshold
        self.binary = binary

    def compute(self, update: ReducedUpdate) -> Tensor:
        """Computes m from Σ δ_i and Σ |δ_i|."""
        return magnitude_agreement_mask(update.sum, update.abs_sum, self.threshold, self.binary)

    def diagnose(self, update: ReducedUpdate, mask: Tensor) -> dict[str, Tensor]:
        """Returns the mean of the mask and the share of coordinates whose agreement is below τ."""
        below = magnitude_agreement(update.sum, update.abs_sum) < self.threshold
        return {"mask/mean": mask.mean(), "mask/below_threshold": below.to(mask.dtype).mean()}
