"""Collects what a LightningModule logs while clients train or while a model is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric

from lightning_fed.core.devices import wide_dtype
from lightning_fed.core.logged_values import LoggedValue, LogOptions, expect_free, scalar
from lightning_fed.core.user_code import lightning_class
from lightning_fed.errors import FederatedError

__all__ = ["LoggedMetrics", "MetricRecorder", "outside_graphs", "recording"]


@dataclass
class LoggedMetrics:
    """Scalars of one round or evaluation by who reads them: loggers, callbacks that monitor a metric, progress bar."""

    logged: dict[str, float]
    callback: dict[str, float]
    progress_bar: dict[str, float]
    goals: dict[str, Literal["min", "max"]] = field(default_factory=dict)  # of metric objects, by `higher_is_better`

    def update(self, other: LoggedMetrics) -> None:
        """Adds the scalars of another collection."""
        self.logged.update(other.logged)
        self.callback.update(other.callback)
        self.progress_bar.update(other.progress_bar)
        self.goals.update(other.goals)


class MetricRecorder:
    """Replaces ``LightningModule.log`` and reduces what is logged over steps, clients and batches.

    Means are weighted by batch size, so a round's mean is weighted over the cohort by samples. Metric objects of
    torchmetrics are computed when the recorder is read. Values logged with ``on_step`` only are reduced
    too, because metrics are written once a round, not once a local step.

    Attributes:
        batch_size: Weight of values logged without a batch size; None to take it from ``batch`` when needed.
        batch: The current batch.
        position: Id of the last client, or index of the last batch, here; the process with the highest one logged last.
        series: What was logged, by name.
        metrics: Metric objects that were logged, by name, with how they are shown and the last batch's value.

    Args:
        suffix: Appended to every name, for named evaluation sets.
        whose: Put between name and suffix, where two parties evaluate.
    """

    def __init__(self, suffix: str = "", whose: str = "") -> None:
        self.batch_size: float | None = 1.0
        self.batch: Any = None
        self.position = -1
        self._suffix, self._whose = suffix, whose
        self.series: dict[str, LoggedValue] = {}
        self._marked: dict[str, LoggedValue] = {}
        self.metrics: dict[str, tuple[Metric, LogOptions, Tensor | None]] = {}

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
        """Takes every argument of ``LightningModule.log``; those about ranks are ignored."""
        suffix = self._suffix if add_dataloader_idx else ""
        options = self.named(LogOptions(name, suffix, prog_bar, logger is not False, bool(on_step and on_epoch)))
        key = f"{name}{options.suffix}"
        if key not in self.series and key not in self.metrics:
            expect_free(key)
        if isinstance(value, Metric):
            last = getattr(value, "_forward_cache", None)  # torchmetrics keeps the value of the last batch there
            self.metrics[key] = (value, options, last)
            return
        series = self.series.get(key)
        if series is None or series.is_default:
            series = self.series[key] = LoggedValue(options, reduce_fx)
        weight = 1.0
        if series.reduction == "mean":
            weight = self.weight() if batch_size is None else batch_size
        series.add(scalar(name, value), weight)

    def log_default(self, name: str, value: Tensor | float) -> None:
        """Records a number under a name that the module may also log itself; the module's own takes precedence."""
        series = self.series.get(name)
        if series is None:
            series = self.series[name] = LoggedValue(LogOptions(name, "", True, True, False), is_default=True)
        if series.is_default:
            series.add(value.detach().reshape(()) if isinstance(value, Tensor) else value, self.weight())

    def named(self, options: LogOptions) -> LogOptions:
        """Returns options, with the set's suffix if they have any, as they are shown here."""
        suffix = self._whose + (self._suffix if options.suffix else "")
        return options if suffix == options.suffix else replace(options, suffix=suffix)

    def weight(self) -> float:
        """Returns the number of samples in the current batch."""
        if self.batch_size is None:
            try:
                self.batch_size = extract_batch_size(self.batch)
            except MisconfigurationException:  # a batch without tensors, such as a list of strings, counts once
                self.batch_size = 1
        return self.batch_size

    def merge(self, series: dict[str, LoggedValue]) -> None:
        """Folds in what was logged elsewhere; what the module logs itself takes precedence over defaults."""
        for key, other in series.items():
            mine = self.series.get(key)
            if mine is None or (mine.is_default and not other.is_default):
                self.series[key] = other.copy()
            elif mine.is_default or not other.is_default:
                mine.merge(other)

    def mark(self) -> None:
        """Remembers what has been logged, for ``roll_back``."""
        self._marked = {key: series.copy() for key, series in self.series.items()}

    def roll_back(self) -> None:
        """Forgets what was logged since ``mark``, except in Metric objects."""
        self.series = self._marked

    def peek(self, name: str) -> Tensor | float | None:
        """Returns the running total of a name without reading it from the device, None if it was not logged."""
        series = self.series.get(name)
        return None if series is None else series.total

    def read(self) -> None:
        """Turns what was logged into numbers, in one transfer per device."""
        totals = _to_floats({key: series.total for key, series in self.series.items() if series.total is not None})
        lasts = _to_floats({key: series.last for key, series in self.series.items()})
        for key, series in self.series.items():
            series.total, series.last = totals[key], lasts[key]

    def compute(self) -> LoggedMetrics:
        """Reads every value once and forgets it; hooks can read Metric objects until ``reset_metrics``."""
        found: dict[str, tuple[Tensor | float, LogOptions, Tensor | float | None]]
        found = {key: (series.result(), series.options, series.last) for key, series in self.series.items()}
        found |= {key: (_computed(key, metric), shown, last) for key, (metric, shown, last) in self.metrics.items()}
        self.series = {}
        values = {key: value for key, (value, _, _) in found.items()}
        values |= {shown.names()[1]: last for _, shown, last in found.values() if shown.both and last is not None}
        metrics = _sort({key: shown for key, (_, shown, _) in found.items()}, _to_floats(values))
        for metric, shown, _ in self.metrics.values():
            if metric.higher_is_better is not None:
                metrics.goals |= dict.fromkeys(shown.names(), "max" if metric.higher_is_better else "min")
        return metrics

    def reset_metrics(self) -> None:
        """Resets every Metric object that was logged since the last reset."""
        for metric, _, _ in self.metrics.values():
            metric.reset()
        self.metrics = {}

    def set_metrics_aside(self) -> list[tuple[Metric, dict[str, Any]]]:
        """Resets every Metric object that was logged; returns them, and those inside them, with their former state."""
        held = [
            (part, {key: list(value) if isinstance(value, list) else value for key, value in vars(part).items()})
            for metric, _, _ in self.metrics.values()
            for part in metric.modules()
            if isinstance(part, Metric)
        ]
        self.reset_metrics()  # empties lists in place
        return held

    def take_metrics_back(self, held: list[tuple[Metric, dict[str, Any]]]) -> None:
        """Restores the Metric objects that were set aside, except those logged here since."""
        mine = {id(part) for metric, _, _ in self.metrics.values() for part in metric.modules()}
        for metric, state in held:
            if id(metric) not in mine:
                vars(metric).update(state)


def _computed(name: str, metric: Metric) -> Tensor:
    value = metric.compute()
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise FederatedError(
            f"Expected {type(metric).__name__}, logged as {name!r}, to compute a single number, got {got}: log its "
            "parts one by one, at the end of the epoch."
        )
    return value.detach().reshape(())


def _to_floats(values: dict[str, Tensor | float]) -> dict[str, float]:
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    floats = {key: float(value) for key, value in values.items() if not isinstance(value, Tensor)}
    for device in {t.device for t in tensors.values()}:
        here = {key: t for key, t in tensors.items() if t.device == device}
        stacked = torch.stack([t.to(wide_dtype(device)).reshape(()) for t in here.values()])
        floats.update(zip(here, stacked.tolist(), strict=True))
    return floats


def _sort(options: dict[str, LogOptions], floats: dict[str, float]) -> LoggedMetrics:
    """Sorts values by who reads them; for callbacks, a name with _step and _epoch also keeps its plain name."""
    sorted_ = LoggedMetrics({}, {}, {})
    for key, shown in options.items():
        names = {key: floats[key]}
        if shown.both:
            _, step, epoch = shown.names()
            names = {epoch: floats[key]} | ({step: floats[step]} if step in floats else {})
        if shown.logger:
            sorted_.logged.update(names)
        if shown.prog_bar:
            sorted_.progress_bar.update(names)
        sorted_.callback.update({**names, key: floats[key]})
    return sorted_


@contextmanager
def recording(module: LightningModule, recorder: MetricRecorder) -> Iterator[MetricRecorder]:
    """Sends ``self.log`` of a module, and of the LightningModules inside it, to a recorder within the block."""

    def log_of(self: LightningModule, *args: Any, **kwargs: Any) -> None:
        recorder.log(*args, **kwargs)

    parts: list[Any] = list(module.modules())
    bases = {part: base for part in parts if (base := lightning_class(type(part), "LightningModule")) is not None}
    log = recorder.log if module._compiler_ctx is None else outside_graphs(recorder.log)
    lent: dict[Any, Any] = {part: log for part, base in bases.items() if type(part).log is base.log}
    if len(lent) < len(bases):  # a module's own `log` still runs; it reaches the recorder by `super().log`
        lent |= dict.fromkeys(bases.values(), log_of)
    before = {owner: vars(owner).get("log") for owner in lent}
    for owner, own in lent.items():
        owner.log = own
    try:
        yield recorder
    finally:
        for owner, former in before.items():
            if former is None:
                del owner.log
            else:
                owner.log = former


def outside_graphs(log: Callable[..., None]) -> Callable[..., None]:
    """Keeps ``MetricRecorder.log`` out of the graphs of ``torch.compile``, because it has side effects.

    It gets copies, because a replayed CUDA graph overwrites its former results.
    """

    def log_copy(name: str, value: Any, *args: Any, **options: Any) -> None:
        log(name, value.clone() if isinstance(value, Tensor) else value, *args, **options)

    disable: Any = torch.compiler.disable  # torch leaves it untyped
    outside: Callable[..., None] = disable(log_copy)
    return outside
