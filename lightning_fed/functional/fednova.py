"""How far a client's optimizer travels: the coefficients that FedNova divides updates by."""

from collections.abc import Sequence

from torch.optim import SGD, Optimizer

from lightning_fed.errors import FederatedError

__all__ = ["optimizer_distance", "sgd_distance"]

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
