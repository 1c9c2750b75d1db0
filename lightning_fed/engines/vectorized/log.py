"""What clients trained at once have logged, kept apart until it is known which of them enter the round."""

import numpy as np
import torch
from torch import Tensor

from lightning_fed.core.logged_values import LoggedValue

__all__ = ["LaneLog"]


class LaneLog:
    """Running reductions of shape (n,), one number for each of n clients.

    Args:
        num_lanes: n.
    """

    def __init__(self, num_lanes: int) -> None:
        self._count = num_lanes
        self._series: dict[str, LoggedValue] = {}
        self._totals: dict[str, Tensor] = {}
        self._lasts: dict[str, Tensor] = {}
        self._weights: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
        self._seen: dict[str, np.ndarray[tuple[int], np.dtype[np.bool_]]] = {}

    def add(self, lanes: slice, logged: dict[str, LoggedValue], totals: dict[str, Tensor]) -> None:
        """Folds in what one step of some clients logged.

        Args:
            lanes: The clients.
            logged: Each name's reduction over the step.
            totals: Its total for each of these clients, shape (m,).
        """
        for key, series in logged.items():
            if key not in self._series or (self._series[key].is_default and not series.is_default):
                self._open(key, series, totals[key])
            into, seen, value = self._totals[key][lanes], self._seen[key][lanes], totals[key].detach()
            if series.reduction in ("mean", "sum"):
                into.add_(value)
            elif not seen.any():
                into.copy_(value)
            else:
                (torch.minimum if series.reduction == "min" else torch.maximum)(into, value.to(into), out=into)
            if series.options.both:
                self._lasts[key][lanes] = value / (series.weight or 1.0) if series.reduction == "mean" else value
            self._weights[key][lanes] += series.weight
            seen[:] = True

    def _open(self, key: str, series: LoggedValue, like: Tensor) -> None:
        self._series[key] = series
        start = {"min": torch.inf, "max": -torch.inf}.get(series.reduction, 0.0)
        self._totals[key] = torch.full((self._count,), start, dtype=like.dtype, device=like.device)
        self._lasts[key] = torch.zeros_like(self._totals[key])
        self._weights[key], self._seen[key] = np.zeros(self._count), np.zeros(self._count, dtype=bool)

    def total(self, key: str) -> Tensor | None:
        """Returns the totals of a name, shape (n,), zero for those that did not log it; None if nobody did."""
        if key not in self._totals:
            return None
        totals, seen = self._totals[key], self._seen[key]
        if seen.all() or self._series[key].reduction in ("mean", "sum"):
            return totals
        return torch.where(torch.from_numpy(seen).to(totals.device), totals, torch.zeros_like(totals))

    def of(self, lanes: list[int]) -> dict[str, LoggedValue]:
        """Reduces what some clients logged to one number for each name."""
        result = {}
        for key, template in self._series.items():
            seen = [lane for lane in lanes if self._seen[key][lane]]
            if not seen:
                continue
            result[key] = series = template.copy()
            values = self._totals[key]
            if len(seen) < self._count:  # several need an index, which is sent to the device
                values = values[seen] if len(seen) > 1 else values[seen[0]]
            reduce = {"min": torch.amin, "max": torch.amax}.get(series.reduction, torch.sum)
            series.total, series.weight = reduce(values), float(self._weights[key][seen].sum())
            series.last = self._lasts[key][seen[-1]]
        return result
