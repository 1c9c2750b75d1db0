"""Logs how far the clients of a round agree on the sign of each coordinate, with any aggregator."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.core.hooks import FederatedCallback, TrainerLike
from lightning_fed.core.updates import Need, ReducedUpdate
from lightning_fed.errors import expect_count, expect_number
from lightning_fed.functional.masks import agreement, coin_flip_votes, sign_agreement_mask, vote_threshold

__all__ = ["UpdateAgreement"]

_BINS = 20


class UpdateAgreement(FederatedCallback):
    """Logs A = |(1/n) Σ_i sign(δ_i)| over the clients that entered the round, and the effect of a mask on it.

    m is the mask of gradient masked averaging with a threshold τ (Tenison et al., TMLR 2023, eq. 3): 1 where A >= τ, A
    elsewhere. The run itself may use this mask, another one or none. Training is the same with and without the
    callback, bit for bit.

    Logs ``agreement/mean`` (of A over all coordinates), ``agreement/below`` (share of A < τ, as in figure 4),
    ``agreement/below_by_chance`` (that share if each sign were a fair coin flip: the binomial distribution of n
    votes, which have equal weight whatever the weights of the mean),
    ``agreement/mask`` (mean of m), with Δ the mean update ``agreement/through`` (‖m ⊙ Δ‖ / ‖Δ‖),
    ``agreement/progress`` (⟨m ⊙ Δ, Δ⟩ / ‖Δ‖²) and ``agreement/cos`` (of the angle between m ⊙ Δ and Δ; progress is
    through times cos), each 1 where it would be 0 / 0,
    ``agreement/overlap`` (intersection over union of the sets A >= τ of this measurement and the last) and
    ``agreement/least`` (the mean of m so far at the coordinate where it is least: an estimate of α = inf_j E[m_j] in
    proposition 4.8). By layer, for each parameter NAME: ``agreement/mean/NAME`` and ``agreement/below/NAME``.

    Args:
        threshold: τ in [0, 1].
        every_n_rounds: Rounds between measurements, at least 1.
        by_layer: Whether to log columns for each parameter.

    Attributes:
        histogram: Coordinates counted by A at the last measurement, in 20 bins of equal width over [0, 1]; the last bin
            includes 1. None before the first.
        coin_flips: The shares of coordinates in these bins if each sign were a fair coin flip.
    """

    needs = Need.SIGN_SUM | Need.MEAN

    def __init__(self, threshold: float = 0.4, every_n_rounds: int = 1, by_layer: bool = False) -> None:
        name = type(self).__name__
        self.threshold = expect_number("threshold", threshold, least=0, most=1, of=name)
        self.every_n_rounds = expect_count("every_n_rounds", every_n_rounds, of=name)
        self.by_layer = by_layer
        self._forget()

    def _forget(self) -> None:
        self._agreed: Tensor | None = None
        self._total: Tensor | None = None
        self._measured = 0
        self.histogram: Tensor | None = None
        self.coin_flips: Tensor | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._forget()

    def on_before_server_step(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        if trainer.round % self.every_n_rounds or not update.num_clients:
            return
        clients, flips = update.num_clients, coin_flip_votes(update.num_clients)
        share = agreement(update.sign_sum, clients)
        mask = sign_agreement_mask(update.sign_sum, clients, self.threshold)
        self.histogram = _bins_of(update.sign_sum, clients).bincount(minlength=_BINS)
        self.coin_flips = _bins_of(torch.arange(clients + 1.0), clients).bincount(flips, _BINS)
        agreed = mask == 1  # m is below 1 exactly where A < τ
        self._total = mask.clone() if self._total is None else self._total.to(mask.device).add_(mask)
        self._measured += 1
        length, masked = torch.linalg.vector_norm(update.mean), mask * update.mean
        through = torch.linalg.vector_norm(masked) / length
        progress = (masked * update.mean).sum() / length**2
        logged = {
            "agreement/mean": share.mean(),
            "agreement/below": 1 - agreed.to(share.dtype).mean(),
            "agreement/below_by_chance": flips[: vote_threshold(self.threshold, clients)].sum().item(),
            "agreement/mask": mask.mean(),
            "agreement/through": torch.where(length > 0, through, 1.0),
            "agreement/progress": torch.where(length > 0, progress, 1.0),
            "agreement/cos": torch.where(through > 0, progress / through, 1.0),
            "agreement/least": self._total.min() / self._measured,
        }
        if self._agreed is not None:
            former = self._agreed.to(agreed.device)  # on the CPU if it is from a checkpoint
            either, both = (found.sum().to(share.dtype) for found in (agreed | former, agreed & former))
            logged["agreement/overlap"] = torch.where(either > 0, both / either, 1.0)
        self._agreed = agreed
        if self.by_layer:
            vector = trainer.vector
            for name, part in zip(vector.names, vector.places().values(), strict=True):
                logged[f"agreement/mean/{name}"] = share[part].mean()
                logged[f"agreement/below/{name}"] = 1 - agreed[part].to(share.dtype).mean()
        pl_module.log_dict(logged)

    def state_dict(self) -> dict[str, Any]:
        return {"agreed": self._agreed, "total": self._total, "measured": self._measured}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._agreed, self._total = state_dict["agreed"], state_dict["total"]
        self._measured = state_dict["measured"]


def _bins_of(votes: Tensor, num_clients: int) -> Tensor:
    """Returns the bin of each |Σ_i sign(δ_i)|; these are integers, so the bins' edges are exact."""
    return (votes.abs() * _BINS / num_clients).long().clamp_(max=_BINS - 1)
