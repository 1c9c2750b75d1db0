"""One logged name: which are free, how it is shown, and its running reduction."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lightning_fed.core.devices import wide_dtype
from lightning_fed.errors import FederatedError

__all__ = ["LogOptions", "LoggedValue", "TOTALS", "expect_free", "scalar"]

TOTALS = ("samples", "gradients", "comm/rounds", "comm/bytes_down", "comm/bytes_up")
"""The columns that are sums over the run."""

_RESERVED = frozenset({"round", *TOTALS})
_RESERVED_GROUPS = ("clients/", "comm/", "fleet/", "simulated/", "time/")

_REDUCTIONS: dict[Any, str] = {
    "mean": "mean", "sum": "sum", "min": "min", "max": "max",
    torch.mean: "mean", torch.sum: "sum", torch.min: "min", torch.max: "max", min: "min", max: "max", sum: "sum",
}  # fmt: skip


@dataclass(frozen=True)
class LogOptions:
    """How a name is shown: its evaluation set's suffix, who reads it, and whether on_step and on_epoch are both set."""

    name: str
    suffix: str
    prog_bar: bool
    logger: bool
    both: bool

    def names(self) -> tuple[str, str, str]:
        """Returns the name, and the two that Lightning makes of it with on_step and on_epoch: name_step, name_epoch."""
        return self.name + self.suffix, f"{self.name}_step{self.suffix}", f"{self.name}_epoch{self.suffix}"


def expect_free(name: str) -> None:
    """Refuses to log under the name of a column that the round loop writes."""
    if name in _RESERVED or name.startswith(_RESERVED_GROUPS):
        raise FederatedError(
            f"Expected `self.log` to get a name of its own, got {name!r}, a column that the trainer writes each round: "
            f"log it under another name, such as `my/{name}`."
        )


class LoggedValue:
    """A running reduction that never leaves the device until it is read.

    Args:
        options: How it is shown.
        reduce_fx: mean, sum, min or max, by name or as torch's or Python's function.
        is_default: Whether the module's own value of the same name replaces it.
    """

    def __init__(
        self, options: LogOptions, reduce_fx: str | Callable[[Any], Any] = "mean", is_default: bool = False
    ) -> None:
        if reduce_fx not in _REDUCTIONS:
            raise FederatedError(
                f"Expected `reduce_fx` of `self.log({options.name!r}, ...)` to be one of mean, sum, min, max, "
                f"got {reduce_fx!r}."
            )
        self.reduction = _REDUCTIONS[reduce_fx]
        self.options = options
        self.is_default = is_default
        self.total: Tensor | float | None = None
        self.weight = 0.0
        self.last: Tensor | float = 0.0

    def add(self, value: Tensor | float, weight: float) -> None:
        """Folds in one value; ``weight`` is the batch size and counts only for means."""
        self.last = value if self.options.both else 0.0  # else unused, and CUDA graphs may overwrite it
        if isinstance(value, Tensor) and isinstance(self.total, Tensor) and value.device != self.total.device:
            value = value.to(self.total.device)
        if self.reduction in ("mean", "sum"):
            self._accumulate(value, weight)
        elif self.total is None:
            self.total = value
        elif isinstance(value, Tensor) or isinstance(self.total, Tensor):
            extreme = torch.minimum if self.reduction == "min" else torch.maximum
            like: Any = value if isinstance(value, Tensor) else self.total
            self.total = extreme(torch.as_tensor(self.total).to(like), torch.as_tensor(value).to(like))
        else:
            self.total = min(self.total, value) if self.reduction == "min" else max(self.total, value)

    def _accumulate(self, value: Tensor | float, weight: float) -> None:
        self.weight += weight
        if not isinstance(value, Tensor):
            self.total = (0.0 if self.total is None else self.total) + value * weight
            return
        if isinstance(self.total, Tensor):
            self.total.add_(value, alpha=weight)
            return
        # Not added in place to a zero: under vmap the zero is one number, but the value has one for each client.
        first = value.to(wide_dtype(value.device)) * weight
        self.total = first + self.total if self.total else first

    def merge(self, other: LoggedValue) -> None:
        """Folds in another running reduction of the same name, whose values come after these."""
        if other.total is None or self.total is None:
            self.total = other.total if self.total is None else self.total
        elif self.reduction in ("mean", "sum"):
            self.total = self.total + other.total
        else:
            self.add(other.total, 0.0)
        self.last = other.last
        self.weight += other.weight

    def copy(self) -> LoggedValue:
        """Returns a copy that later values do not change."""
        twin = copy(self)
        twin.total = self.total.clone() if isinstance(self.total, Tensor) else self.total
        return twin

    def result(self) -> Tensor | float:
        """Returns the reduced value, still on its device."""
        assert self.total is not None
        return self.total / self.weight if self.reduction == "mean" else self.total


def scalar(name: str, value: Any) -> Tensor | float:
    """Takes the number out of a logged value, refusing what is not a single number."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise FederatedError(
                f"Expected `self.log({name!r}, ...)` to get a single number, got a tensor of shape "
                f"{tuple(value.shape)}: reduce it first, for example with `.mean()`."
            )
        value = value.detach().reshape(())
        assert isinstance(value, Tensor)
        return value if value.is_floating_point() else value.to(wide_dtype(value.device))
    if isinstance(value, Real):  # numbers of NumPy too
        return float(value)
    raise FederatedError(
        f"Expected `self.log({name!r}, ...)` to get a number, a tensor of one element or a torchmetrics Metric, "
        f"got {type(value).__name__}: log several values with `self.log_dict`."
    )
