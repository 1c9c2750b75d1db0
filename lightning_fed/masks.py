"""Masks that you can combine with any server rule."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_fed.core.seeding import Purpose, numpy_generator_for
from lightning_fed.core.updates import ByRound, Need, ReducedUpdate, at_round
from lightning_fed.core.vector import names_like
from lightning_fed.errors import FederatedError, expect_choice, expect_count, expect_number
from lightning_fed.functional.masks import (
    magnitude_agreement,
    magnitude_agreement_mask,
    sand_mask,
    sign_agreement_mask,
    vote_threshold,
)

__all__ = [
    "DelayedMask", "MagnitudeAgreement", "Mask", "MaskControl", "NoiseFloorMask", "PartialMask", "SANDMask",
    "SignAgreement",
]  # fmt: skip


class Mask(ABC):
    """Scales each coordinate of the server's step: w <- w + η_g m ⊙ u.

    A subclass says in ``needs`` what it needs from the cohort, and computes m from that. Masks act on trainable
    parameters only, never on buffers.

    Attributes:
        needs: What the mask needs from the cohort.
        seed: The run's seed, set before ``prepare``.
        names: The parameters' names, in the order of the flat vector; set before ``prepare``, which gets their sizes.
    """

    needs: Need = Need.NOTHING
    seed: int = 0
    names: tuple[str, ...] = ()

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

    def over(self, step: Tensor, mask: Tensor) -> Tensor:
        """Applies the mask to a step u, shape (d,): m ⊙ u."""
        return mask * step

    def diagnose(self, update: ReducedUpdate, mask: Tensor) -> dict[str, Tensor]:
        """Returns scalars to log for the round, by name."""
        return {"mask/mean": mask.mean()}


class SignAgreement(Mask):
    """Lets through coordinates on whose sign the clients agree (Tenison et al., TMLR 2023, eq. 3 and Algorithm 1).

    A = |(1/n) Σ_i sign(δ_i)| over the clients that entered the round, unweighted; m = 1 where A >= τ, else A (soft)
    or 0 (binary, the AND-mask of Parascandolo et al., ICLR 2021). τ = 0 is the unmasked rule, bit for bit, unless
    ``comparison`` is ``>``.

    Args:
        threshold: τ in [0, 1]; the paper's default is 0.4. Or such numbers by the first round of each, 0 before.
        binary: Whether coordinates below the threshold are dropped instead of scaled by A.
        comparison: Whether A = τ reaches the threshold (``>=``, the paper's) or not (``>``).
        votes: ``equal`` (the paper's): each client has one vote. ``samples``: it has one for each of its training
            samples, A = |Σ_i s_i sign(δ_i)| / Σ_i s_i.
    """

    needs = Need.SIGN_SUM

    def __init__(
        self,
        threshold: ByRound = 0.4,
        binary: bool = False,
        comparison: Literal[">=", ">"] = ">=",
        votes: Literal["equal", "samples"] = "equal",
    ) -> None:
        self.threshold = _threshold(threshold)
        self.comparison = expect_choice("--aggregator.mask.comparison", comparison, (">=", ">"))
        self.votes = expect_choice("--aggregator.mask.votes", votes, ("equal", "samples"))
        self.binary = binary
        if votes == "samples":
            self.needs = Need.WEIGHTED_SIGN_SUM | Need.MEAN  # the mask gets the dtype of the mean

    def compute(self, update: ReducedUpdate) -> Tensor:
        votes, count = self._count(update)
        mask = sign_agreement_mask(votes, count, at_round(self.threshold, update.round), self.binary, self.comparison)
        return mask if self.votes == "equal" else mask.to(update.mean.dtype)

    def diagnose(self, update: ReducedUpdate, mask: Tensor) -> dict[str, Tensor]:
        votes, count = self._count(update)
        below = votes.abs() < vote_threshold(at_round(self.threshold, update.round), count, self.comparison)
        return {"mask/mean": mask.mean(), "mask/below_threshold": below.to(mask.dtype).mean()}

    def _count(self, update: ReducedUpdate) -> tuple[Tensor, int]:
        """Returns the sum of the votes on each coordinate, and how many there are."""
        if self.votes == "equal":
            return update.sign_sum, update.num_clients
        return update.weighted_sign_sum, sum(client.num_samples for client in update.clients)


class MagnitudeAgreement(Mask):
    """Lets through coordinates on which the clients' updates do not cancel each other.

    A = |Σ_i δ_i| / Σ_i |δ_i| (0/0 = 0) over the clients that entered the round, unweighted; m = 1 where A >= τ, else A
    (soft) or 0 (binary). As ``SignAgreement``, but a vote weighs as much as the client's step, so clients with larger
    updates count for more. The paper on gradient masked averaging (Tenison et al., TMLR 2023) leaves magnitudes to
    future work. τ = 0 is the unmasked rule, bit for bit.

    Args:
        threshold: τ in [0, 1], or such numbers by the first round of each, 0 before.
        binary: Whether coordinates below the threshold are dropped instead of scaled by A.
    """

    needs = Need.SUM | Need.ABS_SUM

    def __init__(self, threshold: ByRound = 0.4, binary: bool = False) -> None:
        self.threshold = _threshold(threshold)
        self.binary = binary

    def compute(self, update: ReducedUpdate) -> Tensor:
        return magnitude_agreement_mask(update.sum, update.abs_sum, at_round(self.threshold, update.round), self.binary)

    def diagnose(self, update: ReducedUpdate, mask: Tensor) -> dict[str, Tensor]:
        below = magnitude_agreement(update.sum, update.abs_sum) < at_round(self.threshold, update.round)
        return {"mask/mean": mask.mean(), "mask/below_threshold": below.to(mask.dtype).mean()}


class SANDMask(Mask):
    """Lets through coordinates on whose sign and size the clients agree (Shahtalebi et al., "SAND-mask", 2021).

    m = max(0, tanh(k (A - τ) / Var_i δ_i)) with A = |(1/n) Σ_i sign(δ_i)| and the unbiased variance over the clients
    that entered the round, both unweighted; then m is divided by 1e-10 + mean(m) within each parameter tensor, as
    DomainBed does. No value of τ is the unmasked rule.

    Args:
        threshold: τ in [0, 1], or such numbers by the first round of each, 0 before. Coordinates with A <= τ are
            dropped, so 1, DomainBed's default, drops all of them.
        k: Steepness, above 0; DomainBed's default is 10. Compare it with squared updates: if k is much larger, all
            coordinates with A > τ count alike; if it is much smaller, differences in A and in variance decide.
    """

    needs = Need.SIGN_SUM | Need.VARIANCE

    def __init__(self, threshold: ByRound = 0.4, k: float = 10.0) -> None:
        self.threshold = _threshold(threshold)
        self.k = expect_number("--aggregator.mask.k", k, above=0)

    def compute(self, update: ReducedUpdate) -> Tensor:
        tau = at_round(self.threshold, update.round)
        return sand_mask(update.sign_sum, update.variance, update.num_clients, tau, self.k, self.sizes)

    def diagnose(self, update: ReducedUpdate, mask: Tensor) -> dict[str, Tensor]:
        """Returns the mean of the mask, near 1 by construction, and the share of coordinates with A < τ."""
        below = update.sign_sum.abs() < vote_threshold(at_round(self.threshold, update.round), update.num_clients)
        return {"mask/mean": mask.mean(), "mask/below_threshold": below.to(mask.dtype).mean()}


class NoiseFloorMask(Mask):
    """Lets through coordinates that rise above the noise of differential privacy.

    m = 1 where |Δ̃| >= τ σ, else 0, with the mean Δ̃ after the noise and the known standard deviation σ of this: a hard
    threshold (Donoho, Johnstone, 1994). It reads nothing else, so it is post-processing and costs no ε. It asks whether
    there is a signal, not whether clients agree; of coordinates of noise alone 32 % pass τ = 1, and 5 % pass τ = 2.
    τ = 0, or no noise, is the unmasked rule, bit for bit.

    Args:
        threshold: τ, at least 0; or such numbers by the first round of each, 0 before.
    """

    needs = Need.MEAN

    def __init__(self, threshold: ByRound = 1.0) -> None:
        self.threshold = expect_number("--aggregator.mask.threshold", threshold, least=0, by_round=True)

    def compute(self, update: ReducedUpdate) -> Tensor:
        return (update.mean.abs() >= at_round(self.threshold, update.round) * update.noise).to(update.mean.dtype)


class _MaskOfAnother(Mask):
    """A mask built on an inner mask, which it also prepares."""

    def __init__(self, mask: Mask, what_for: str) -> None:
        if not isinstance(mask, Mask):
            raise FederatedError(
                f"Expected `--aggregator.mask.mask` to be the mask {what_for}, such as SignAgreement, got "
                f"{type(mask).__name__}."
            )
        self.mask = mask
        self.needs = mask.needs

    def prepare(self, sizes: Sequence[int]) -> None:
        super().prepare(sizes)
        self.mask.seed, self.mask.names = self.seed, self.names
        self.mask.prepare(sizes)

    def over(self, step: Tensor, mask: Tensor) -> Tensor:
        return self.mask.over(step, mask)

    def diagnose(self, update: ReducedUpdate, mask: Tensor) -> dict[str, Tensor]:
        return self.mask.diagnose(update, mask)


class MaskControl(_MaskOfAnother):
    """Keeps one property of another mask m, to find out where its effect comes from.

    u is the step without a mask. ``progress``: u ⟨m ⊙ u, u⟩ / ‖u‖², the unmasked step, as far along itself as the
    masked one gets. ``length``: u ‖m ⊙ u‖ / ‖u‖, the unmasked step with the length of the masked one; m ⊙ u is turned
    away from u, so this goes 1 / cos(m ⊙ u, u) times as far along u as m ⊙ u. ``direction``: m ⊙ u ‖u‖ / ‖m ⊙ u‖, the
    masked step with the length of the unmasked one. ``values``: m' ⊙ u, where m' holds the values of m in random order
    within each parameter tensor. The order is drawn anew each round, and is the same on every process and after a
    resumption. A step of length 0 stays as it is. If m is 1 everywhere, all four are the unmasked rule, bit for bit.
    The logged scalars are those of m.

    Args:
        mask: m.
        keep: ``progress``, ``length``, ``direction`` or ``values``.
    """

    def __init__(self, mask: Mask, keep: Literal["progress", "length", "direction", "values"]) -> None:
        self.keep = expect_choice("--aggregator.mask.keep", keep, ("progress", "length", "direction", "values"))
        super().__init__(mask, "to control")

    def compute(self, update: ReducedUpdate) -> Tensor:
        mask = self.mask.compute(update)
        if self.keep != "values":
            return mask
        draw = numpy_generator_for(self.seed, Purpose.MASK, update.round)
        parts = torch.split(mask, list(self.sizes))
        return torch.cat([part[torch.from_numpy(draw.permutation(len(part))).to(part.device)] for part in parts])

    def over(self, step: Tensor, mask: Tensor) -> Tensor:
        masked = self.mask.over(step, mask)
        if self.keep == "values":
            return masked
        if self.keep == "progress":
            whole, left = (step * step).sum(), (masked * step).sum()  # of equal products, so 1 is exact
            return step * torch.where(whole > 0, left / whole, 1.0)
        whole, left = torch.linalg.vector_norm(step), torch.linalg.vector_norm(masked)
        if self.keep == "length":
            return step * torch.where(whole > 0, left / whole, 1.0)
        return masked * torch.where(left > 0, whole / left, 1.0)


class DelayedMask(_MaskOfAnother):
    """Applies another mask m only after some rounds of the unmasked rule.

    m = 1 in rounds 1 to ``rounds``, then the other mask; with 0 rounds it is the other mask, bit for bit. Two runs that
    differ only in the mask have the same model until then, so you can compare the masks in a single round (Tenison et
    al., TMLR 2023, Tables 4 and 5).

    Args:
        mask: m after the delay.
        rounds: Rounds without it, at least 0.
    """

    def __init__(self, mask: Mask, rounds: int) -> None:
        super().__init__(mask, "to begin later")
        self.rounds = expect_count("--aggregator.mask.rounds", rounds, least=0)

    def compute(self, update: ReducedUpdate) -> Tensor:
        mask = self.mask.compute(update)
        return torch.ones_like(mask) if update.round <= self.rounds else mask


class PartialMask(_MaskOfAnother):
    """Applies another mask m to some parameters only: m = 1 in those whose names fit one of the patterns.

    Args:
        mask: m for all other parameters.
        unmasked: Patterns of parameter names, such as ``head.*``; ``head`` means all below it.
    """

    def __init__(self, mask: Mask, unmasked: list[str]) -> None:
        super().__init__(mask, "of the other parameters")
        self.unmasked = unmasked

    def compute(self, update: ReducedUpdate) -> Tensor:
        whole = names_like(self.names, self.unmasked, "--aggregator.mask.unmasked")
        parts = zip(self.names, torch.split(self.mask.compute(update), list(self.sizes)), strict=True)
        return torch.cat([torch.ones_like(part) if name in whole else part for name, part in parts])


def _threshold(given: ByRound) -> ByRound:
    return expect_number("--aggregator.mask.threshold", given, least=0, most=1, by_round=True)
