"""Pure functions on tensors: no trainer, no module, no input or output."""

from lightning_fed.functional.masks import agreement, sign_agreement_mask, vote_threshold

__all__ = ["agreement", "sign_agreement_mask", "vote_threshold"]
