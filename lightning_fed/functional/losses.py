"""What a client adds to its loss, or makes of its scores, before the backward pass.

Scores have shape (B, C) for B samples and C classes, or (B, C, ...) with labels (B, ...), as in torch's cross-entropy;
counts are those of a client's own training labels, shape (C,). All of it works under ``torch.func.vmap``.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["calibration_margins", "contrastive_loss", "log_priors", "not_true_divergence", "restricted_factors"]

# Far below every score, and finite: what is left out of a softmax is exactly 0 there, and a criterion that reads the
# logarithm of every class, such as label smoothing, stays finite.
_LEFT_OUT = -1e4


def _of_counts(counts: Tensor, absent: float, value: Callable[[Tensor], Tensor]) -> Tensor:
    """Takes a value of each class's count, with ``absent`` samples in classes that have none; 0 leaves these out."""
    present = counts > 0
    found = value(torch.where(present, counts, absent or 1.0))
    return found if absent else torch.where(present, found, _LEFT_OUT)


def calibration_margins(counts: Tensor, tau: float, absent: float = 0.0) -> Tensor:
    """Computes -τ n_c^{-1/4}, which ``FedLC`` adds to the score of class c.

    A class without samples counts for ``absent`` of them; with 0 it leaves the softmax, the limit n_c → 0.
    """
    return _of_counts(counts, absent, lambda n: -tau * n.pow(-0.25))


def log_priors(counts: Tensor, tau: float, absent: float = 0.0) -> Tensor:
    """Computes τ log p_c of ``LogitAdjustment``, p_c = n_c / Σ n; for ``absent`` see ``calibration_margins``."""
    return _of_counts(counts, absent, lambda n: tau * (n / counts.sum()).log())


def restricted_factors(counts: Tensor, alpha: float) -> Tensor:
    """Computes the factors of ``FedRS``: α for classes without samples and 1 for others."""
    return torch.where(counts > 0, 1.0, alpha).to(counts.dtype)


def contrastive_loss(live: Tensor, pulls: Tensor, pushes: Tensor, temperature: float) -> Tensor:
    """Computes the mean of -log(e^{s(z, z_w)/τ} / (e^{s(z, z_w)/τ} + e^{s(z, z_i)/τ})), s the cosine, for ``MOON``.

    ``live`` is z, the features of the samples at the live weights, shape (B, ...), ``pulls`` is z_w, those at the
    global model, and ``pushes`` is z_i, those at the client's last model.
    """
    live = live.flatten(1)
    near, far = (F.cosine_similarity(live, other.flatten(1), dim=1) for other in (pulls, pushes))
    return F.softplus((far - near) / temperature).mean()


def not_true_divergence(live: Tensor, teacher: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Computes τ² times the mean of KL(q̃_w ‖ q̃), q̃ the softmax of scores / τ over all classes but the true one.

    For ``FedNTD``; τ², which keeps the gradient's size, is in the authors' code. ``live`` are scores at the live
    weights, ``teacher`` those at the global model. A label that is no class, such as -100, counts for nothing.
    """
    classes = torch.arange(live.shape[1], device=live.device).view(-1, *[1] * (live.ndim - 2))
    true, least = labels.unsqueeze(1) == classes, torch.finfo(live.dtype).min / 2
    own, other = (F.log_softmax((s / temperature).masked_fill(true, least), 1) for s in (live, teacher.to(live.dtype)))
    known = true.any(1)
    divergence = (other.exp() * (other - own)).sum(1) * known
    return temperature**2 * divergence.sum() / known.sum().clamp_min(1)
