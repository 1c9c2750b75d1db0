"""What clients compute: terms of their gradients and losses, how far their optimizers travel, and how values differ.

Vectors have shape (d,). w is the round's global model, w_i the client's weights, g_i = ∇f_i(w) its gradient over all
its data, g̅ = Σ p_i g_i. Results go to ``out``, of a dtype at least as wide, which is returned. Scores have shape (B, C)
for B samples and C classes, or (B, C, ...) with labels (B, ...), as in torch's cross-entropy; counts are those of a
client's own training labels, shape (C,). What concerns losses works under ``torch.func.vmap``.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from lightning_fed.errors import FederatedError
from lightning_fed.functional.geometry import wide_dtype

__all__ = [
    "ClientSummary", "calibration_margins", "contrastive_loss", "control_variate", "difference", "linear_scaling_shift",
    "log_priors", "not_true_divergence", "of_length", "optimizer_distance", "restricted_factors", "sgd_distance",
    "summarize_clients",
]  # fmt: skip

# Far below every score, and finite: what is left out of a softmax is exactly 0 there, and a criterion that reads the
# logarithm of every class, such as label smoothing, stays finite.
_LEFT_OUT = -1e4

_OWN_SCALE = "divides the gradient by a running measure of its own size"
_REASONS = {
    "ASGD": "also shrinks the weights and keeps a running average of them",
    "LBFGS": "takes inner steps whose number and lengths its search decides",
    "Muon": "replaces the gradient by an orthogonal matrix",
    "Rprop": "uses only the gradient's sign",
    **dict.fromkeys(
        ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SparseAdam"),
        _OWN_SCALE,
    ),
}
_SAME_IN_ALL_GROUPS = ("lr", "momentum", "dampening", "nesterov", "maximize")


def difference(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Computes left - right in the precision of ``out``, as g̅ - g_i, or w_i - w, the gradient of ½ ‖w_i - w‖²."""
    if left.dtype == right.dtype == out.dtype:
        return torch.sub(left, right, out=out)  # one pass over the memory instead of two
    return out.copy_(left).sub_(right)


def of_length(length: float, vector: Tensor) -> Tensor:
    """Gives vectors, shape (d,) or (m, d), a length, in place; one of 0 has no direction and stays 0."""
    norm, limits = torch.linalg.vector_norm(vector, dim=-1, keepdim=True), torch.finfo(vector.dtype)
    factor = (length / norm.clamp_min(limits.tiny)).clamp_max(limits.max)  # finite: times a vector of 0 it is 0
    return vector.mul_(factor)


def linear_scaling_shift(mean: Tensor, gradient: Tensor, num_clients: int, lr: float, out: Tensor) -> Tensor:
    """Computes (α/2) Σ_{j≠i} g_j of ``LinearScaling`` from (1/n) Σ g_j, g_i, n and the learning rate α; 0 if n = 1."""
    return out.copy_(mean).mul_(num_clients).sub_(gradient).mul_(lr / 2)


def control_variate(correction: Tensor, moved: Tensor, distance: float, out: Tensor) -> Tensor:
    """Computes c_i⁺ = c_i - c - (w_i - w) / a_i of ``SCAFFOLD`` (eq. 4, option II) from c - c_i, w_i - w and a_i > 0.

    For constant corrections it is the mean of the client's gradients, weighted as by its optimizer.
    """
    return out.copy_(moved).div_(-distance).sub_(correction)


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


def sgd_distance(
    learning_rates: Sequence[float],
    momentum: float | Sequence[float] = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    pull: float = 0.0,
) -> float:
    """Computes a, how far SGD moves a scalar whose gradient is always 1 (Wang et al., NeurIPS 2020, section 4).

    It simulates the steps of ``torch.optim.SGD`` without weight decay, so that any schedule is exact. In closed form,
    for K steps at the constant rate η with momentum ρ and S = (K - ρ (1 - ρ^K) / (1 - ρ)) / (1 - ρ):

    - plain: η K
    - momentum: η S
    - momentum with dampening κ: η ((1 - κ) S + κ (1 - ρ^K) / (1 - ρ)), because the first step is not damped
    - Nesterov: η (K + ρ S)
    - plain, with a term μ (w_i - w) in the objective's gradient (FedProx): (1 - (1 - η μ)^K) / μ

    ``learning_rates`` has one for each step, ``momentum`` is ρ, or one for each step too, and ``pull`` is μ.
    """
    momenta = [momentum] * len(learning_rates) if isinstance(momentum, (int, float)) else momentum
    distance, buffer = 0.0, None
    for lr, rho in zip(learning_rates, momenta, strict=True):
        step = gradient = 1.0 - pull * distance
        if rho != 0:
            # As in torch, the first gradient goes into the buffer undamped.
            buffer = gradient if buffer is None else rho * buffer + (1 - dampening) * gradient
            step = gradient + rho * buffer if nesterov else buffer
        distance += lr * step
    return distance


def optimizer_distance(
    optimizer: Optimizer,
    learning_rates: Sequence[float],
    momenta: Sequence[float] | None = None,
    pull: float = 0.0,
    asked_by: str = "--aggregator",
) -> float:
    """Computes the distance a_i of a client from its optimizer and the learning rates that it used.

    Only the local steps of one client and round count, because it begins with a fresh optimizer. Weight decay does not
    count. All optimizers but ``torch.optim.SGD`` are refused, and parameter groups that differ in an option that
    counts. ``learning_rates`` and ``pull`` are as in ``sgd_distance``; ``momenta`` has one value per step, if a
    schedule has changed the optimizer's; ``asked_by`` is the option that needs a_i, for messages.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, SGD) or type(optimizer).step is not SGD.step:
        reason = _REASONS.get(name, "is not known to move by a fixed multiple of the gradient")
        raise FederatedError(
            "Expected SGD as the clients' optimizer, as their updates are divided by the distance that it travels, "
            f"got {name}, which {reason}: change `--model.optimizer` or `{asked_by}`."
        )
    first, *others = optimizer.param_groups
    for key in _SAME_IN_ALL_GROUPS:
        values = [group[key] for group in (first, *others)]
        if any(float(value) != float(values[0]) for value in values):
            raise FederatedError(
                f"Expected every parameter group of the clients' {name} to have the same {key}, as updates are divided "
                f"by one distance, got {', '.join(str(float(value)) for value in values)}: change `--model.optimizer` "
                f"or `{asked_by}`."
            )
    momentum = float(first["momentum"]) if momenta is None else momenta
    return sgd_distance(learning_rates, momentum, float(first["dampening"]), bool(first["nesterov"]), pull)


class ClientSummary(NamedTuple):
    """What ``summarize_clients`` returns, in float64, each of shape ().

    Attributes:
        mean: (1/n) Σ v_i.
        weighted: Σ s_i v_i / Σ s_i.
        worst: Mean of the worst tenth of the clients, ⌈n/10⌉ of them.
        std: sqrt((1/n) Σ (v_i - mean)²), with n and not n - 1, as the clients are all there are.
    """

    mean: Tensor
    weighted: Tensor
    worst: Tensor
    std: Tensor


def summarize_clients(values: Tensor, weights: Tensor, lower_is_better: bool) -> ClientSummary:
    """Computes how a metric is distributed over clients; NaN if one of the values is NaN.

    ``values`` are v_i, one of each client, ``weights`` its samples s_i, with a sum above 0; both of shape (n,), n >= 1.
    """
    values = values.to(wide_dtype(values))
    weights = weights.to(values)
    worst = values.topk(-(-len(values) // 10), largest=lower_is_better).values
    mean = values.mean()
    worst = torch.where(mean.isnan(), mean, worst.mean())  # `topk` takes a NaN for the largest
    return ClientSummary(mean, weights @ values / weights.sum(), worst, values.std(correction=0))
