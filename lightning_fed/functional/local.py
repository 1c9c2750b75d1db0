"""What client algorithms add to a local gradient, where they take it, and what a client keeps.

Vectors have shape (d,). w is the round's global model, w_i the client's weights, g_i = ∇f_i(w) its gradient over all
its data, g̅ = Σ p_i g_i. Results go to ``out``, which is returned.
"""

import torch
from torch import Tensor

__all__ = ["control_variate", "difference", "linear_scaling_shift"]


def difference(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Computes left - right in the precision of ``out``, as g̅ - g_i, or w_i - w, the gradient of ½ ‖w_i - w‖².

    Args:
        left: A vector.
        right: Another one.
        out: Receives the result, in a dtype at least as wide.
    """
    if left.dtype == right.dtype == out.dtype:
        return torch.sub(left, right, out=out)  # one pass over the memory instead of two
    return out.copy_(left).sub_(right)


def linear_scaling_shift(mean: Tensor, gradient: Tensor, num_clients: int, lr: float, out: Tensor) -> Tensor:
    """Computes (α/2) Σ_{j≠i} g_j (Dandi, Barba, Jaggi, AAAI 2022, appendix A.2), zero for one client.

    Args:
        mean: (1/n) Σ g_j.
        gradient: g_i.
        num_clients: n.
        lr: α, the learning rate of the step.
        out: Receives the result.
    """
    return out.copy_(mean).mul_(num_clients).sub_(gradient).mul_(lr / 2)


def control_variate(correction: Tensor, moved: Tensor, distance: float, out: Tensor) -> Tensor:
    """Computes c_i⁺ = c_i - c - (w_i - w) / a_i (Karimireddy et al., ICML 2020, eq. 4, option II).

    For constant corrections it is the mean of the client's gradients, weighted as by its optimizer. With plain SGD
    a_i = K_i η; for other forms of SGD see ``sgd_distance``.

    Args:
        correction: c - c_i, what was added to every local gradient.
        moved: w_i - w.
        distance: a_i above 0, in units of the learning rate.
        out: Receives the result.
    """
    return out.copy_(moved).div_(-distance).sub_(correction)
