"""Collects what a LightningModule logs while clients train or while a model is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_fed.errors import FederatedError

__all__ = ["LoggedMetrics", "MetricRecorder", "recording"]

_REDUCTIONS: dict[Any, str] = {
    "mean": "mean", "sum": "sum", "min": "min", "max": "max",
    torch.mean: "mean", torch.sum: "sum", torch.min: "min", torch.max: "max", min: "min", max: "max", sum: "sum",
}  # fmt: skip


@dataclass
class LoggedMetrics:
    """Scalars of one round or evaluation, sorted by who reads them.

    Attributes:
        logged: For loggers.
        callback: For callbacks that monitor a metric.
        progress_bar: For the progress bar.
    """

    logged: dict[str, float]
    callback: dict[str, float]
    progress_bar: dict[str, float]

    def update(self, other: LoggedMetrics) -> None:
        """Adds the scalars of another collection."""
        self.logged.update(other.logged)
        self.callback.update(other.callback)
        self.progress_bar.update(other.progress_bar)


class _Series:
    """One logged name: a running reduction that never leaves the device until it is read."""

    def __init__(self, reduction: str, options: dict[str, bool]) -> None:
        self.reduction = reduction
        self.options = options
        self.total: Tensor | float | None = None
        self.weight = 0.0
        self.last: Tensor | float = 0.0

    def add(self, value: Tensor | float, weight: float) -> None:
        """Folds in one value; ``weight`` is the batch size and counts only for means."""
        self.last = value
        if self.reduction in ("mean", "sum"):
            self._accumulate(value, weight if self.reduction == "mean" else 1.0)
        elif self.total is None:
            self.total = value
        elif isinstance(value, Tensor) or isinstance(self.total, Tensor):
            extreme = torch.minimum if self.reduction == "min" else torch.maximum
            self.total = extreme(torch.as_tensor(self.total), torch.as_tensor(value))
        else:
            self.total = min(self.total, value) if self.reduction == "min" else max(self.total, value)

    def _accumulate(self, value: Tensor | float, weight: float) -> None:
        self.weight += weight
        if not isinstance(value, Tensor):
            self.total = (0.0 if self.total is None else self.total) + value * weight
            return
        if not isinstance(self.total, Tensor):
            wide = torch.float32 if value.device.type == "mps" else torch.float64
            self.total = torch.full((), self.total or 0.0, dtype=wide, device=value.device)
        self.total.add_(value, alpha=weight)

    def result(self) -> Tensor | float:
        """Returns the reduced value, still on its device."""
        assert self.total is not None
        return self.total / self.weight if self.reduction == "mean" else self.total


class MetricRecorder:
    """Stands in for ``LightningModule.log`` and reduces over steps, clients and batches.

    Means are weighted by batch size, so a round's mean is weighted over the cohort by samples. Metric objects of
    torchmetrics are computed and reset when the recorder is read. Values logged with ``on_step`` only are reduced
    too: a local step of a client has no place on an axis of rounds.

    Args:
        suffix: Appended to every name, for named evaluation sets.
    """

    def __init__(self, suffix: str = "") -> None:
        self.batch_size: float = 1.0
        self._suffix = suffix
        self._series: dict[str, _Series] = {}
        self._metrics: dict[str, tuple[Metric, dict[str, bool]]] = {}

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Any], Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Takes every argument of ``LightningModule.log``; those about ranks have nothing to do here."""
        key = f"{name}{self._suffix}" if add_dataloader_idx else name
        both = bool(on_step and on_epoch)
        options = {"prog_bar": prog_bar, "logger": logger is not False, "both": both}
        if isinstance(value, Metric):
            self._metrics[key] = (value, options)
            return
        series = self._series.get(key)
        if series is None:
            if reduce_fx not in _REDUCTIONS:
                raise FederatedError(
                    f"Expected `reduce_fx` of `self.log({name!r}, ...)` to be one of mean, sum, min, max, "
                    f"got {reduce_fx!r}."
                )
            series = self._series[key] = _Series(_REDUCTIONS[reduce_fx], options)
        series.add(_scalar(name, value), self.batch_size if batch_size is None else batch_size)

    def log_default(self, name: str, value: Tensor) -> None:
        """Records a value under a name that the module may also log itself; the module's own takes precedence."""
        series = self._series.get(name)
        if series is None:
            series = self._series[name] = _Series("mean", {"prog_bar": True, "logger": True, "both": False})
        series.add(value.detach(), self.batch_size)

    def peek(self, name: str) -> Tensor | float | None:
        """Returns the running total of a name without reading it from the device, None if it was not logged."""
        series = self._series.get(name)
        return None if series is None else series.total

    def compute(self) -> LoggedMetrics:
        """Reads every value once, resets Metric objects and empties the recorder."""
        results: dict[str, tuple[float, dict[str, bool]]] = {}
        values = {key: s.result() for key, s in self._series.items()}
        lasts = {f"{key}_step": s.last for key, s in self._series.items() if s.options["both"]}
        floats = _to_floats({**values, **lasts})
        for key, series in self._series.items():
            results[key] = (floats[key], series.options)
        for key, (metric, options) in self._metrics.items():
            results[key] = (float(metric.compute()), options)
        for metric, _ in self._metrics.values():
            metric.reset()
        self._series, self._metrics = {}, {}
        return _sort(results, floats)


def _scalar(name: str, value: Any) -> Tensor | float:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise FederatedError(
                f"Expected `self.log({name!r}, ...)` to get a single number, got a tensor of shape "
                f"{tuple(value.shape)}: reduce it first, for example with `.mean()`."
            )
        value = value.detach().reshape(())
        assert isinstance(value, Tensor)
        return value if value.is_floating_point() else value.double()
    if isinstance(value, (int, float)):
        return float(value)
    raise FederatedError(
        f"Expected `self.log({name!r}, ...)` to get a number, a tensor of one element or a torchmetrics Metric, "
        f"got {type(value).__name__}."
    )


def _to_floats(values: dict[str, Tensor | float]) -> dict[str, float]:
    """Moves all tensors to Python in one transfer per device."""
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    floats = {key: float(value) for key, value in values.items() if not isinstance(value, Tensor)}
    for device in {t.device for t in tensors.values()}:
        here = {key: t for key, t in tensors.items() if t.device == device}
        wide = torch.float32 if device.type == "mps" else torch.float64
        stacked = torch.stack([t.to(wide) for t in here.values()])
        floats.update(zip(here, stacked.tolist(), strict=True))
    return floats


def _sort(results: dict[str, tuple[float, dict[str, bool]]], floats: dict[str, float]) -> LoggedMetrics:
    """Names values as Lightning does: with both on_step and on_epoch, ``name_step`` and ``name_epoch`` are logged."""
    sorted_ = LoggedMetrics({}, {}, {})
    for key, (value, options) in results.items():
        names = {key: value}
        if options["both"]:
            names = {f"{key}_epoch": value}
            if f"{key}_step" in floats:
                names[f"{key}_step"] = floats[f"{key}_step"]
        if options["logger"]:
            sorted_.logged.update(names)
        if options["prog_bar"]:
            sorted_.progress_bar.update(names)
        sorted_.callback.update({**names, key: value})
    return sorted_


@contextmanager
def recording(module: LightningModule, recorder: MetricRecorder) -> Iterator[MetricRecorder]:
    """Sends ``self.log`` of a module, and of the LightningModules inside it, to a recorder within the block."""
    owners = [m for m in module.modules() if isinstance(m, LightningModule)]
    before = [owner.__dict__.get("log") for owner in owners]
    for owner in owners:
        owner.__dict__["log"] = recorder.log
    try:
        yield recorder
    finally:
        for owner, former in zip(owners, before, strict=True):
            if former is None:
                owner.__dict__.pop("log", None)
            else:
                owner.__dict__["log"] = former
