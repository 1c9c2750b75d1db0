"""Means of a cohort's updates that a minority of corrupted clients cannot move far.

``updates`` are δ_i, shape (n, d), floating, n at least 1; a mean of them is of shape (d,), in their dtype.
``num_corrupted`` is f.
"""

from collections.abc import Callable
from statistics import NormalDist

import torch
from torch import Tensor

from lightning_fed.errors import FederatedError
from lightning_fed.functional.geometry import combine_rows, squared_distances, value_order, waits, wide_dtype

__all__ = [
    "bulyan", "check_bulyan", "check_krum", "check_trim", "coordinate_median", "geometric_median", "krum_scores",
    "krum_select", "supported_deviations", "trimmed_mean",
]  # fmt: skip

# Coordinates sorted at a time: sorting makes copies and indices, which then stay small beside the matrix itself.
_COLUMNS = 1 << 16
# Iterations between two checks for the end, if a check has to wait for the device.
_LOOKS_EVERY = 8


def coordinate_median(updates: Tensor) -> Tensor:
    """Computes the middle value of each coordinate, the mean of the middle two for even n; see ``CoordinateMedian``."""
    low, high = (len(updates) - 1) // 2, len(updates) // 2
    return _of_sorted(updates, lambda ordered: (ordered[low] + ordered[high]) / 2)


def trimmed_mean(updates: Tensor, trim: int) -> Tensor:
    """Computes the mean of each coordinate without its k smallest and k largest values; see ``TrimmedMean``."""
    check_trim(len(updates), trim)
    return _of_sorted(updates, lambda ordered: ordered[trim : len(updates) - trim].mean(dim=0))


def _of_sorted(updates: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Applies a function from (n, c) to (c,) to the coordinates in ascending order."""
    return torch.cat([reduce(columns.sort(dim=0).values) for columns in torch.split(updates, _COLUMNS, dim=1)])


def check_trim(num_clients: int, trim: int) -> None:
    """Refuses to cut all of a cohort's values: 2k < n must hold."""
    if 2 * trim >= num_clients:
        raise FederatedError(
            f"Expected at least {2 * trim + 1} clients in a round to cut {trim} at each end, got {num_clients}: lower "
            "`--aggregator.trim` or raise `--trainer.clients_per_round`; clients without samples or that diverged do "
            "not count."
        )


def check_krum(num_clients: int, num_corrupted: int, num_selected: int | None = None) -> None:
    """Refuses a cohort too small for Krum: n >= 2f + 3 (Blanchard et al., NeurIPS 2017, section 4) and m <= n."""
    _expect_enough(num_clients, 2, num_corrupted, "Krum")
    if num_selected is not None and num_selected > num_clients:
        raise FederatedError(
            f"Expected at least as many clients in a round as Krum selects, {num_selected}, got {num_clients}: lower "
            "`--aggregator.num_selected` or raise `--trainer.clients_per_round`."
        )


def check_bulyan(num_clients: int, num_corrupted: int) -> None:
    """Refuses a cohort too small for Bulyan: n >= 4f + 3 (El Mhamdi et al., ICML 2018, section 4)."""
    _expect_enough(num_clients, 4, num_corrupted, "Bulyan")


def _expect_enough(num_clients: int, times: int, num_corrupted: int, name: str) -> None:
    needed = times * num_corrupted + 3
    if num_clients < needed:
        raise FederatedError(
            f"Expected at least {times}f + 3 = {needed} clients in a round for {name} with f = {num_corrupted}, got "
            f"{num_clients}: lower `--aggregator.num_corrupted` or raise `--trainer.clients_per_round`; clients "
            "without samples or that diverged do not count."
        )


def krum_scores(updates: Tensor, num_corrupted: int) -> Tensor:
    """Computes each client's sum of squared distances to its n - f - 2 nearest others, shape (n,), float64."""
    check_krum(len(updates), num_corrupted)
    return _scores(squared_distances(updates), num_corrupted)


def _scores(distances: Tensor, num_corrupted: int) -> Tensor:
    """Computes Krum's scores, shape (m,), from the distances of m clients, whose diagonal it overwrites."""
    distances.fill_diagonal_(-1.0)  # so that a client itself comes first, and is left out
    return distances.sort(dim=1).values[:, 1 : max(len(distances) - num_corrupted - 1, 1)].sum(dim=1)


def krum_select(updates: Tensor, num_corrupted: int, num_selected: int = 1) -> Tensor:
    """Selects the rows of the m clients with the lowest Krum scores, scored once; shape (m,), int64.

    The best comes first, equal scores in the order of ``value_order``.
    """
    check_krum(len(updates), num_corrupted, num_selected)
    order = value_order(updates)
    return order[krum_scores(updates, num_corrupted)[order].argsort(stable=True)[:num_selected]]


def bulyan(updates: Tensor, num_corrupted: int) -> Tensor:
    """Computes the step of ``Bulyan``.

    Krum picks one client after another among those that are left, until θ = n - 2f are picked; equal scores, which the
    nearest two always have once each counts one neighbour, go by ``value_order``. Each coordinate is then the mean of
    their θ - 2f values nearest to its median. f = 0 is the mean of all.
    """
    check_bulyan(len(updates), num_corrupted)
    left, picked, distances = value_order(updates).tolist(), list[int](), squared_distances(updates).cpu()
    while len(picked) < len(updates) - 2 * num_corrupted:
        scores = _scores(distances[left][:, left], num_corrupted)
        picked.append(left.pop(int(scores.argsort(stable=True)[0])))
    low, high, kept = (len(picked) - 1) // 2, len(picked) // 2, len(picked) - 2 * num_corrupted

    def mean_near_median(ordered: Tensor) -> Tensor:
        far = (ordered - (ordered[low] + ordered[high]) / 2).abs()
        return ordered.gather(0, far.argsort(dim=0, stable=True)[:kept]).mean(dim=0)

    return _of_sorted(updates[sorted(picked)], mean_near_median)


def geometric_median(
    updates: Tensor, weights: Tensor, iterations: int = 100, tolerance: float = 1e-6, smoothing: float = 1e-6
) -> Tensor:
    """Computes the point with the least weighted sum of distances, for ``GeometricMedian``, in float64.

    From the weighted mean, z <- Σ β_i δ_i / Σ β_i with β_i = p_i / max(ν, ‖z - δ_i‖), the smoothed Weiszfeld algorithm.
    It ends when z moves by at most ``tolerance`` times the harmonic mean of the distances ‖z - δ_i‖, which far-off
    updates cannot raise, or after ``iterations``; ν is ``smoothing``. The p_i, shape (n,), need a positive sum.
    """
    wide = wide_dtype(updates)
    shares = (weights / weights.sum()).to(updates.device, wide)  # so that 1 / Σ pulls is the harmonic mean
    center, moves = combine_rows(updates, shares), torch.ones((), dtype=torch.bool, device=updates.device)
    looks_every = _LOOKS_EVERY if waits(updates) else 1
    for iteration in range(1, iterations + 1):
        distances = torch.stack([torch.linalg.vector_norm(center - row) for row in updates])
        pulls = shares / distances.clamp(min=smoothing)
        total = pulls.cumsum(0)[-1]  # in ascending order of i
        former, center = center, torch.where(moves, combine_rows(updates, pulls / total), center)
        moves = moves & ~(torch.linalg.vector_norm(center - former) * total <= tolerance)
        if iteration % looks_every == 0 and not moves:
            break
    return center.to(updates.dtype)


def supported_deviations(num_clients: int, num_corrupted: int) -> float:
    """Computes z of ``ALIE``: Φ(z) = (n - m - s) / (n - m), with s = ⌊n/2 + 1⌋ - m honest clients beyond it, from n, m.

    Where the attackers are a majority, and s not positive, one client is left beyond it; z is at least 0.
    """
    honest = max(num_clients - num_corrupted, 1)
    supporters = max(num_clients // 2 + 1 - num_corrupted, 1)
    return NormalDist().inv_cdf(min(max((honest - supporters) / honest, 0.5), 1 - 0.5 / honest))
