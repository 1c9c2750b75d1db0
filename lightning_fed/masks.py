"""The mask of gradient masked averaging."""

from typing import Literal

from torch import Tensor

from lightning_fed.errors import FederatedError
from lightning_fed.functional.masks import sign_agreement_mask, vote_threshold
from lightning_fed.masks.base import Mask
from lightning_fed.reduction import Need, ReducedUpdate

__all__ = ["SignAgreement"]


class SignAgreement(Mask):
    """Lets through coordinates on whose sign the clients agree (Tenison et al., TMLR 2023, eq. 2 and Algorithm 1).

    A = |(1/n) Σ_i sign(δ_i)| over the clients that entered the round, unweighted; m = 1 where A >= τ, else A (soft)
    or 0 (binary, the AND-mask of Parascandolo et al., ICLR 2021). τ = 0 is the unmasked rule, bit for bit, unless
    ``comparison`` is ``>``.

    Args:
        threshold: τ in [0, 1]; the paper's default is 0.4.
        binary: Whether coordinates below the threshold are dropped instead of scaled by A.
        comparison: Whether A = τ reaches the threshold (``>=``, the paper's) or not (``>``).
        votes: ``equal``, the paper's: one vote for each client. ``samples``: as many as the client has training
            samples, A = |Σ_i s_i sign(δ_i)| / Σ_i s_i.

    Raises:
        FederatedError: If the threshold is outside [0, 1], or another argument is not one of its values.
    """

    needs = Need.SIGN_SUM

    def __init__(
        self,
        threshold: float = 0.4,
        binary: bool = False,
        comparison: Literal[">=", ">"] = ">=",
        votes: Literal["equal", "samples"] = "equal",
    ) -> None:
        vote_threshold(threshold, 1, comparison)
        if votes not in ("equal", "samples"):
            raise FederatedError(f"Expected `--aggregator.mask.votes` to be one of equal, samples, got {votes!r}.")
        self.threshold = threshold
        self.binary = binary
        self.comparison = comparison
        self.votes = votes
        if votes == "samples":
            self.needs = Need.WEIGHTED_SIGN_SUM | Need.MEAN  # the mean tells the dtype of the mask

    def compute(self, update: ReducedUpdate) -> Tensor:
        """Computes m from the sum of the votes and their number."""
        votes, count = self._count(update)
        mask = sign_agreement_mask(votes, count, self.threshold, self.binary, self.comparison)
        return mask if self.votes == "equal" else mask.to(update.mean.dtype)

    def diagnose(self, update: ReducedUpdate, mask: Tensor) -> dict[str, Tensor]:
        """Returns the mean of the mask and the share of coordinates whose agreement does not reach τ."""
        votes, count = self._count(update)
        below = votes.abs() < vote_threshold(self.threshold, count, self.comparison)
        return {"mask/mean": mask.mean(), "mask/below_threshold": below.to(mask.dtype).mean()}

    def _count(self, update: ReducedUpdate) -> tuple[Tensor, int]:
        """Returns the sum of the votes on each coordinate, and how many there are."""
        if self.votes == "equal":
            return update.sign_sum, update.num_clients
        return update.weighted_sign_sum, sum(client.num_samples for client in update.clients)
