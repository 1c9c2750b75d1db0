"""Combines clients' updates that conflict with each other: by signs, or by weights from their inner products.

With weights, a rule computes c_i, shape (n,), from ``gram``, G_ij = ⟨δ_i, δ_j⟩ of n updates δ_i, and ``shares``, p_i,
which sum to 1; its step is Σ c_i δ_i. It works on n x n numbers, in double precision, and reads the updates only twice.
"""

import warnings
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_fed.functional.geometry import wide_dtype

__all__ = [
    "alignment_weights", "cagrad_weights", "fedawa_offsets", "fedfv_weights", "least_norm", "mgda_weights",
    "pcgrad_weights", "square_of_sum", "ties_mean", "without_conflicts",
]  # fmt: skip

Array: TypeAlias = npt.NDArray[np.float64]

# Coordinates processed at a time, so that temporary results stay small beside the matrix itself.
_COLUMNS = 1 << 16
# A sum shorter than this share of its summands' lengths is not to be told from 0 by inner products.
_HIDDEN = 1e-6
# The most exchanges of weight between two clients; a cohort needs some hundreds.
_EXCHANGES = 100_000


def ties_mean(updates: Tensor, keep: float) -> Tensor:
    """Computes the mean over the clients of the elected sign, shape (d,), in the dtype of ``updates``; see ``TIES``.

    Each client keeps its largest coordinates, at least one; equal ones are kept together. s = sign(Σ of what is kept),
    0 where the sum is only rounding. The result is the mean over the clients that kept a value of sign s, 0 if s = 0.
    """
    dropped = updates.shape[1] - max(1, round(keep * updates.shape[1]))
    least = torch.stack([row.abs().kthvalue(dropped + 1).values for row in updates])[:, None]
    wide, means = wide_dtype(updates), []
    rounding = torch.finfo(updates.dtype).eps + len(updates) * torch.finfo(wide).eps  # of the updates, of their sum
    for columns in torch.split(updates, _COLUMNS, dim=1):
        kept = torch.where(columns.abs() >= least, columns, 0.0)
        total, size = (part.sum(dim=0, dtype=wide) for part in (kept, kept.abs()))
        elected = torch.where(total.abs() > rounding * size, total, 0.0).sign()
        agreeing = (kept.sign() == elected) & (elected != 0)
        means.append(torch.where(agreeing, kept, 0.0).sum(dim=0) / agreeing.sum(dim=0).clamp(min=1))
    return torch.cat(means)


def pcgrad_weights(gram: Array, shares: Array, orders: npt.NDArray[np.int64]) -> Array:
    """Computes c_i of ``PCGrad``; without conflicts c_i = p_i.

    g_i starts as δ_i and meets the other updates one after another, as they were at first. If ⟨g_i, δ_j⟩ < 0,
    g_i <- g_i - ⟨g_i, δ_j⟩ δ_j / ‖δ_j‖². The step is Σ p_i g_i. ``orders`` has the other clients in the order in which
    each client meets them, shape (n, n - 1).
    """
    made_of = np.eye(len(gram))  # g_i = Σ_j made_of[i, j] δ_j
    for met in orders.T:
        products = (made_of * gram[met]).sum(axis=1)
        conflicting = np.flatnonzero(products < 0)
        others = met[conflicting]
        made_of[conflicting, others] -= products[conflicting] / gram[others, others]
    weights: Array = shares @ made_of
    return weights


def square_of_sum(gram: Array, weights: Array) -> float:
    """Computes ‖Σ c_i δ_i‖² from G and c_i, shape (n,); 0 if it is no more than the rounding of G."""
    square = float(weights @ gram @ weights)
    return square if square > 1e-15 * float(np.abs(weights) @ np.sqrt(gram.diagonal())) ** 2 else 0.0


def fedfv_weights(gram: Array, shares: Array, losses: Array, alpha: float, ranks: Array | None = None) -> Array:
    """Computes c_i of the step of ``FedFV`` before its length is restored (Algorithm 2); α = 1 gives p_i.

    As PCGrad, but each update meets the others in ascending order of their losses f_i, so that the client with the
    greatest loss comes last. The updates of the α n greatest losses (rounded, but at least one unless α = 0) stay as
    they are. Equal losses are ordered by ``ranks``, shape (n,), without these by their rows.
    """
    ascending = np.lexsort((np.arange(len(gram)) if ranks is None else ranks, losses))
    spared = np.zeros(len(gram), dtype=bool)
    spared[ascending[len(gram) - max(round(alpha * len(gram)), alpha > 0) :]] = True
    orders = np.array([ascending[ascending != i] for i in range(len(gram))])
    weights: Array = pcgrad_weights(gram, np.where(spared, 0.0, shares), orders) + np.where(spared, shares, 0.0)
    return weights


def without_conflicts(step: Tensor, former: list[Tensor]) -> Tensor:
    """Removes from a step g, shape (d,), what conflicts with updates of one earlier round (``FedFV``, Algorithm 3).

    g <- g - ⟨g, v⟩ v / ‖v‖² with v = Σ of the updates for which ⟨g, δ⟩ < 0; without such updates g stays as it is.
    """
    against = [update for each in former if torch.dot(step, update := each.to(step)) < 0]
    if not against:
        return step
    total = torch.stack(against).sum(dim=0)
    return step - total * (torch.dot(step, total) / torch.dot(total, total))


def mgda_weights(gram: Array, shares: Array, epsilon: float) -> Array:
    """Computes c_i = λ_i / ‖δ_i‖ of ``FedMGDA``: λ = argmin ‖Σ λ_i δ_i / ‖δ_i‖‖² over the simplex, |λ_i - p_i| <= ε.

    An update of 0 has no direction and is left out; the other p_i are normalised. ε = 0 gives Σ p_i δ_i / ‖δ_i‖.
    """
    moved = np.flatnonzero(gram.diagonal() > 0)
    weights, lengths = np.zeros(len(gram)), np.sqrt(gram.diagonal()[moved])
    if len(moved):
        cosines = gram[np.ix_(moved, moved)] / np.outer(lengths, lengths)
        weights[moved] = least_norm(cosines, shares[moved] / shares[moved].sum(), reach=epsilon) / lengths
    return weights


def cagrad_weights(gram: Array, shares: Array, kappa: float) -> Array:
    """Computes c_i of the step u of ``FedOMG``, which makes the least ⟨δ_i, u⟩ greatest within κ ‖ḡ‖ of ḡ = Σ p_i δ_i.

    Its γ also minimises ½ ‖g_γ‖² + t ⟨g_γ, ḡ⟩ for the t at which ‖g_γ‖ = t κ ‖ḡ‖, and then u = ḡ + g_γ / t. As
    ‖g_γ‖ / t falls with t, bisection finds that t. If a mean of updates is 0, rounding hides it, and a t close to 0 is
    used: close beside the updates that g_γ is made of, which may be far shorter than others. κ = 0 gives ḡ.
    """
    from scipy.optimize import brentq  # here: the import takes as long as a small run

    along = gram @ shares  # ⟨δ_i, ḡ⟩
    radius, lengths = kappa * np.sqrt(square_of_sum(gram, shares)), np.sqrt(gram.diagonal())
    if radius == 0:
        return shares
    shortest = lengths[lengths > 0].min()
    uneven = shortest < 1e-3 * lengths.max()

    def gamma(t: float) -> Array:
        return (_least_norm_of_uneven if uneven else least_norm)(gram, shares, t * along)

    def excess(t: float) -> float:
        weights = gamma(t)
        return float(np.sqrt(max(float(weights @ gram @ weights), 0.0)) - radius * t)

    highest = float(lengths.max()) / radius  # no mean of updates is longer than all of them
    # Below t ‖g_γ‖ is lost in the rounding of G, unless the updates in it are shorter.
    t, above = _HIDDEN * highest, 2 * highest
    while excess(t) <= 0 and (hidden := _HIDDEN * max(gamma(t) @ lengths, shortest) / radius) < t / 2:
        t, above = max(hidden, 1e-3 * t), t
    if excess(t) > 0:
        t = brentq(excess, t, above, xtol=1e-15 * (above / 2), rtol=1e-14, maxiter=1000)
    weights: Array = shares + gamma(t) / t
    return weights


def alignment_weights(gram: Array, shares: Array, iterations: int, mix: float = 0.0) -> Array:
    """Computes c_i = (1 - γ) ω_i + γ / n of ``FedGaLAServer``, with v_i = p_i δ_i and γ = ``mix``.

    Without iterations ω_i = 1/n. a is the mean of the v_i at first, then, again and again, ω_i ∝ 1 + cos(v_i, a) and
    a = Σ ω_i v_i. A vector of 0, or of no more than rounding, has the cosine 0 to any.
    """
    equal = np.full(len(gram), 1 / len(gram))
    weights, products = equal, gram * np.outer(shares, shares)
    for _ in range(iterations):
        lengths = np.sqrt(products.diagonal() * square_of_sum(products, weights))
        cosines = np.divide(products @ weights, lengths, out=np.zeros(len(gram)), where=lengths > 0)
        weights = 1 + np.clip(cosines, -1, 1)
        weights = weights / weights.sum()
    mixed: Array = (1 - mix) * weights + mix * equal
    return mixed


def fedawa_offsets(gram: Array, shares: Array, apart: Array, offsets: Array, steps: int, rate: float) -> Array:
    """Takes steps of Adam on the b_i of ``FedAWA``, shape (n,), from ``offsets``; ``apart`` are the d(w, w_i).

    β are 0.5 and 0.999 and ε 1e-8, as in the authors' code, from moments of 0. With λ on the simplex r_i² =
    ‖δ_i - Σ λ_j δ_j‖² is Σ_j λ_j D_ij - ½ λᵀ D λ, D the squared distances; its slope is D_ij - (D λ)_j.
    """
    squares = gram.diagonal()
    distances = np.maximum(np.add.outer(squares, squares) - 2 * gram, 0.0)
    distances[distances <= 1e-14 * squares.max()] = 0.0  # no more than the rounding of G
    first, second, moved = np.zeros(len(gram)), np.zeros(len(gram)), offsets.copy()
    for step in range(1, steps + 1):
        weights = shares * np.exp(moved - moved.max())
        weights /= weights.sum()
        mean = distances @ weights
        lengths = np.sqrt(np.maximum(mean - weights @ mean / 2, 0.0))
        pulls = np.divide(weights, 2 * lengths, out=np.zeros(len(gram)), where=lengths > 0)
        slope = lengths + apart + pulls @ distances - pulls.sum() * mean
        slope = weights * (slope - weights @ slope)
        first, second = 0.5 * first + 0.5 * slope, 0.999 * second + 0.001 * slope**2
        moved -= rate * (first / (1 - 0.5**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
    return moved


def least_norm(gram: Array, start: Array, linear: Array | float = 0.0, reach: float = 1.0) -> Array:
    """Finds λ = argmin ½ ‖Σ λ_i δ_i‖² + Σ b_i λ_i over the simplex, |λ_i - λ⁰_i| <= ``reach``.

    By sequential minimal optimisation (Platt, 1998): each step moves weight from the client with the largest slope of
    the objective to the one with the smallest, as far as this lowers it, until the gain is only rounding. λ⁰ is
    ``start``, on the simplex, b is ``linear``, shape (n,); a reach of 0 gives λ⁰, from 1 on there is no bound.
    """
    low, high = np.maximum(start - reach, 0.0), np.minimum(start + reach, 1.0)
    weights, slope = start.copy(), gram @ start + linear
    rounding = 4e-15 * max(float(gram.diagonal().max()), float(np.abs(slope).max()))
    for _ in range(_EXCHANGES):
        gains = int(np.where(high - weights > 1e-15, slope, np.inf).argmin())
        gives = int(np.where(weights - low > 1e-15, slope, -np.inf).argmax())
        pays = slope[gives] - slope[gains]
        if not pays > rounding:
            break
        curvature = gram[gains, gains] + gram[gives, gives] - 2 * gram[gains, gives]
        room = min(high[gains] - weights[gains], weights[gives] - low[gives])
        step = room if curvature * room <= pays else pays / curvature
        weights[gains] += step
        weights[gives] -= step
        slope += step * (gram[gains] - gram[gives])
    else:
        warnings.warn(
            f"The weights of {len(start)} clients are not exact: {_EXCHANGES:,} exchanges were not enough, and one "
            f"more would still gain by a slope of {pays:.1e}.",
            stacklevel=2,
        )
    return weights


def _least_norm_of_uneven(gram: Array, start: Array, linear: Array) -> Array:
    """Does what ``least_norm`` does without a bound, exactly beside the shortest updates in the sum, not the longest.

    Each exchange is the one that lowers the objective most, as the largest slopes are those of long updates, which may
    have hardly any weight; now and then all clients that have some go towards what is least among them.
    """
    weights, lengths, squares = start.copy(), np.sqrt(gram.diagonal()), gram.diagonal()
    longer, curvature = np.maximum.outer(lengths, lengths), np.add.outer(squares, squares) - 2 * gram
    along = float(np.abs(linear)[lengths > 0] @ (1 / lengths[lengths > 0]))
    for exchange in range(_EXCHANGES):
        slope = gram @ weights + linear
        pays = np.subtract.outer(slope, slope)
        step = np.minimum(weights[:, None], np.divide(pays, curvature, out=np.ones_like(pays), where=curvature > 0))
        rounding = 4e-15 * longer * (float(weights @ lengths) + along)
        lowers = np.where(pays > rounding, step * (pays - curvature * step / 2), 0.0)
        gives, gains = np.unravel_index(int(lowers.argmax()), lowers.shape)
        if not lowers[gives, gains] > 0:
            break
        weights[gains] += step[gives, gains]
        weights[gives] -= step[gives, gains]
        if exchange % 8 == 7:
            weights = _towards_least(gram, weights, linear, lengths)
    return weights


def _towards_least(gram: Array, weights: Array, linear: Array, lengths: Array) -> Array:
    """Moves λ towards the least objective among the clients with weight, until the first of them has none left."""
    some = np.flatnonzero(weights)
    base = some[lengths[some].argmin()]
    some, slope, move = some[some != base], gram @ weights + linear, np.zeros(len(gram))
    apart = (gram - gram[base] - gram[:, [base]] + gram[base, base])[np.ix_(some, some)]  # ⟨δ_i - δ_b, δ_j - δ_b⟩
    scale = np.sqrt(np.maximum(apart.diagonal(), 1e-300))
    cosines, pays = apart / np.outer(scale, scale), (slope[base] - slope[some]) / scale
    move[some] = np.linalg.lstsq(cosines, pays, rcond=1e-14)[0] / scale
    move[base] = -move.sum()
    shares = np.divide(weights, -move, out=np.ones(len(gram)), where=move < 0)
    moved: Array = np.maximum(weights + min(shares.min(), 1.0) * move, 0.0)
    if shares.min() < 1:
        moved[shares.argmin()] = 0.0
    return moved
