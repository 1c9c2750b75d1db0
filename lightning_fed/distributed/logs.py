"""Merges the logs of all processes of a run, so that all read the same numbers."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule
from torchmetrics import Metric

from lightning_fed.core.logged_values import LoggedValue, LogOptions
from lightning_fed.core.recorder import MetricRecorder
from lightning_fed.distributed.processes import Processes
from lightning_fed.errors import FederatedError

__all__ = ["Logged", "gather_logged", "logged_here", "logging_alone", "merge_logged", "sync_metrics"]


class Logged(NamedTuple):
    """The logs of one process.

    Attributes:
        position: Its progress in the common work; the process with the largest one logged the last value.
        series: Reductions by name, copied from the device.
        metrics: For each Metric object its attribute in the module (None if not found), display options, last value.
    """

    position: int
    series: dict[str, LoggedValue]
    metrics: dict[str, tuple[str | None, LogOptions, Any]]


@contextmanager
def logging_alone(processes: Processes, recorder: MetricRecorder) -> Iterator[None]:
    """Lets each process do its own part of some work; its logs must be merged afterwards.

    Values logged before are the same on all processes, and count once.
    """
    if processes.rank > 0:
        recorder.series = {}
    with processes.working_alone():
        yield


def gather_logged(processes: Processes, recorder: MetricRecorder, module: LightningModule) -> None:
    """Fills a recorder with the logs of all processes; all processes must call it."""
    if processes.size > 1:
        merge_logged(processes.exchange(logged_here(recorder, module), "logged"), recorder, module)


def logged_here(recorder: MetricRecorder, module: LightningModule) -> Logged:
    """Returns the logs of this process."""
    places = {id(part): name for name, part in module.named_modules() if isinstance(part, Metric)}
    metrics = {
        key: (places.get(id(metric)), options, None if last is None else last.cpu())
        for key, (metric, options, last) in recorder.metrics.items()
    }
    recorder.read()
    return Logged(recorder.position, recorder.series, metrics)


def merge_logged(everyone: Sequence[Logged], recorder: MetricRecorder, module: LightningModule) -> None:
    """Fills a recorder with the logs of all processes; the module's Metric objects compute over all of them."""
    order = sorted(range(len(everyone)), key=lambda rank: everyone[rank].position)
    recorder.series = {}
    for here in everyone:
        recorder.merge(here.series)
    for key, logged in (item for rank in order for item in everyone[rank].series.items()):
        if logged.is_default == recorder.series[key].is_default:
            recorder.series[key].last = logged.last
    recorder.metrics = _find([everyone[rank].metrics for rank in order], recorder, module)
    for part in module.modules():
        if isinstance(part, Metric):  # a cached value is only that of this process, or an old one
            part._computed = None


def _find(
    parts: list[dict[str, tuple[str | None, LogOptions, Any]]], recorder: MetricRecorder, module: LightningModule
) -> dict[str, tuple[Metric, LogOptions, Any]]:
    """Finds all Metric objects that any process has logged, in the same order everywhere, as they compute together."""
    logged = {key: each for part in parts for key, each in part.items()}
    found = {}
    for key in sorted(logged):
        place, options, last = logged[key]
        if place is None and any(key not in part for part in parts):
            raise FederatedError(
                f"Expected every Metric that is logged to be an attribute of {type(module).__name__}, got {key!r}, "
                "which not every process has: make it one in `__init__`, or set `--trainer.devices 1`."
            )
        metric = recorder.metrics[key][0] if place is None else module.get_submodule(place)
        assert isinstance(metric, Metric)
        found[key] = (metric, options, last)
    return found


def sync_metrics(processes: Processes, module: LightningModule) -> None:
    """Lets the module's Metric objects compute over all processes, except while each process works alone."""
    if processes.size == 1:
        return
    if processes.rank > 0:  # it may get no batch of a small set, but takes part in computing all the same
        warnings.filterwarnings("ignore", "The ``compute`` method of metric .* was called before the ``update``")
    for part in module.modules():
        if isinstance(part, Metric):
            part.distributed_available_fn = processes.are_together
            part.dist_sync_fn = processes.gather_tensor
