"""The smoothed AND-mask."""

from torch import Tensor

from lightning_fed.checks import is_number
from lightning_fed.errors import FederatedError
from lightning_fed.functional.masks import sand_mask, vote_threshold
from lightning_fed.masks.base import Mask
from lightning_fed.reduction import Need, ReducedUpdate

__all__ = ["SANDMask"]


class SANDMask(Mask):
    """Lets through coordinates on whose sign and size the clients agree (Shahtalebi et al., "SAND-mask", 2021).

    m = max(0, tanh(k (A - τ) / Var_i δ_i)) with A = |(1/n) Σ_i sign(δ_i)| and the unbiased variance over the clients
    that entered the round, both unweighted; then m is divided by 1e-10 + mean(m) within each parameter tensor, as
    DomainBed does. No value of τ is the unmasked rule.

    Args:
        threshold: τ in [0, 1]. Coordinates of A <= τ are dropped, so 1, DomainBed's default, drops all of them.
        k: Steepness, above 0; DomainBed's default is 10. Its scale is that of the squared updates: far above it every
            coordinate of A > τ counts alike, far below it only the differences in A and in variance do.

    Raises:
        FederatedError: If an argument is out of range.
    """

    needs = Need.SIGN_SUM | Need.VARIANCE

    def __init__(self, threshold: float = 0.4, k: float = 10.0) -> None:
        vote_threshold(threshold, 1)
        if not is_number(k, above=0):
            raise FederatedError(f"Expected `--aggregator.mask.k` to be above 0 and finite, got {k}.")
        self.threshold = threshold
        self.k = k

    def compute(self, update: ReducedUpdate) -> Tensor:
        """Computes m from Σ sign(δ_i), the variance, n and the sizes given to ``prepare``."""
        return sand_mask(update.sign_sum, update.variance, update.num_clients, self.threshold, self.k, self.sizes)

    def diagnose(self, update: ReducedUpdate, mask: Tensor) -> dict[str, Tensor]:
        """Returns the mean of the mask, near 1 by construction, and the share of coordinates of A < τ."""
        below = update.sign_sum.abs() < vote_threshold(self.threshold, update.num_clients)
        return {"mask/mean": mask.mean(), "mask/below_threshold": below.to(mask.dtype).mean()}
