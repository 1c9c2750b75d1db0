"""What client algorithms add to a local gradient, where they take it, and what a client keeps.

Vectors have shape (d,). w is the round's global model, w_i the client's weights, g_i = ∇f_i(w) its gradient over all
its data, g̅ = Σ p_i g_i. Results go to ``out``, of a dtype at least as wide, which is returned.
"""

import torch
from torch import Tensor

__all__ = ["control_variate", "difference", "linear_scaling_shift", "of_length"]


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
