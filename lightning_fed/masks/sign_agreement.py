"""The mask of gradient masked averaging."""

from torch import Tensor

from lightning_fed.functional.masks import sign_agreement_mask, vote_threshold
from lightning_fed.masks.base import Mask
from lightning_fed.reduction import Need, ReducedUpdate

__all__ = ["SignAgreement"]


class SignAgreement(Mask):
    """Lets through coordinates on whose sign the clients agree (Tenison et al., TMLR 2023, eq. 2 and Algorithm 1).

    A = |(1/n) Σ_i sign(δ_i)| over the clients that entered the round, unweighted; m = 1 where A >= τ, else A (soft)
    or 0 (binary, the AND-mask of Parascandolo et al., ICLR 2021). τ = 0 is the unmasked rule, bit for bit.

    Args:
        threshold: τ in [0, 1]; the paper's default is 0.4.
        binary: Whether coordinates below the threshold are dropped instead of scaled by A.

    Raises:
        FederatedError: If the threshold is outside [0, 1].
    """

    needs = Need.SIGN_SUM

    def __init__(self, threshold: float = 0.4, binary: bool = False) -> None:
        vote_threshold(threshold, 1)
        self.threshold = threshold
        self.binary = binary

    def compute(self, update: ReducedUpdate) -> Tensor:
        """Computes m from Σ sign(δ_i) and n."""
        return sign_agreement_mask(update.sign_sum, update.num_clients, self.threshold, self.binary)

    def diagnose(self, update: ReducedUpdate, mask: Tensor) -> dict[str, Tensor]:
        """Returns the mean of the mask and the share of coordinates whose agreement is below τ."""
        below = update.sign_sum.abs() < vote_threshold(self.threshold, update.num_clients)
        return {"mask/mean": mask.mean(), "mask/below_threshold": below.to(mask.dtype).mean()}
