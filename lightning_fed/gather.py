"""What the processes of a run bring together once a round, so that each goes on with the same numbers, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_fed.errors import FederatedError
from lightning_fed.metrics import MetricRecorder
from lightning_fed.processes import Processes
from lightning_fed.reduction import Need, ReducedUpdate, RoundReducer, is_averaged
from lightning_fed.series import LogOptions, Series

if TYPE_CHECKING:
    from lightning_fed.engines import Engine
    from lightning_fed.trainer import FederatedTrainer

__all__ = ["SharedReducer", "apart", "gather_counts", "gather_rows", "make_reducer", "sync_metrics"]


def make_reducer(trainer: FederatedTrainer, num_registered: int) -> RoundReducer:
    """Makes what a round keeps of the updates, over all processes of the run."""
    needs = trainer.aggregator.all_needs
    if trainer.processes.size == 1:
        return RoundReducer(trainer.weights, needs, num_registered)
    averaged = trainer.buffers.live.tensors if trainer.aggregator.buffers == "average" else dict
    return SharedReducer(trainer.processes, averaged, trainer.weights, needs, num_registered)


class SharedReducer(RoundReducer):
    """Adds up what each process has reduced over its own clients.

    Args:
        processes: The processes of the run.
        averaged: Returns the live module's buffers by name, if they are averaged.
        *args: See ``RoundReducer``.
    """

    def __init__(self, processes: Processes, averaged: Callable[[], dict[str, Tensor]], *args: Any) -> None:
        super().__init__(*args)
        self._processes, self._averaged = processes, averaged
        alike = [need for need in self._sums if need != Need.WEIGHTED_SIGN_SUM]  # which is wider
        if alike:
            self._whole = torch.stack([self._sums[need] for need in alike])
            self._sums.update(zip(alike, self._whole, strict=True))  # parts of one vector: one reduction

    def reduce(self, round: int) -> ReducedUpdate:
        """Closes the round over all processes."""
        losses: list[Any] = torch.stack(self._losses).tolist() if self._losses else [None] * len(self._clients)
        own = list(zip(self._clients, self._weights, self._distances, losses, strict=True))
        everyone = self._processes.exchange(own, "updates")
        entries = sorted((entry for part in everyone for entry in part), key=lambda entry: entry[0].id)
        if not entries:
            return super().reduce(round)
        self._merge_moments([len(part) for part in everyone])
        rows, place = self._rows, {client.id: at for at, (client, *_) in enumerate(entries)}
        places = [place[client.id] for client in self._clients]
        self._rows = {
            need: gather_rows(self._processes, own[: len(places)], places, len(entries)) for need, own in rows.items()
        }
        self._add_up()
        self._clients, self._weights, self._distances, losses = (list(part) for part in zip(*entries, strict=True))
        self._losses = [torch.tensor(loss, dtype=torch.float64) for loss in losses if loss is not None]
        update = super().reduce(round)
        self._rows = rows
        return update

    def _add_up(self) -> None:
        """Adds sums and buffers over the processes; a process without a client has none of the latter yet."""
        if self._sums:
            wide = self._sums.get(Need.WEIGHTED_SIGN_SUM)
            if len(self._sums) > (wide is not None):
                self._processes.sum(self._whole)
            if wide is not None:
                self._processes.sum(wide)
        live = self._averaged()
        added = [name for name, buffer in live.items() if is_averaged(buffer)]
        for dtype in sorted({live[name].dtype for name in added}, key=str):
            names = [name for name in added if live[name].dtype == dtype]
            wider = torch.promote_types(dtype, torch.float64)
            for name in names:
                self._buffers.setdefault(name, torch.zeros_like(live[name], dtype=wider))
            self._processes.sum(*(self._buffers[name] for name in names))
        self._take_maxima({name: buffer for name, buffer in live.items() if name not in added})

    def _take_maxima(self, live: dict[str, Tensor]) -> None:
        lowest = torch.iinfo(torch.int64).min
        none = {name: torch.full_like(buffer, lowest, dtype=torch.int64) for name, buffer in live.items()}
        wide = {name: self._buffers[name].long() if name in self._buffers else none[name] for name in live}
        self._processes.max(*wide.values())
        self._buffers.update((name, value.to(live[name].dtype)) for name, value in wide.items())

    def _merge_moments(self, counts: list[int]) -> None:
        """Merges the processes' means and squared deviations, in the order of ranks (Chan et al., 1979).

        With δ = m_b − m_a: m = m_a + δ n_b / n, S = S_a + S_b + δ² n_a n_b / n. For equal updates S stays exactly 0.
        """
        if not self._moments:
            return
        parts, total = [torch.zeros_like(moment) for moment in self._moments], 0
        for rank, count in enumerate(counts):
            if count:
                other = torch.stack(self._moments)
                self._processes.broadcast(other, source=rank)
                total += count
                apart = other[0].sub_(parts[0])
                parts[0].add_(apart, alpha=count / total)
                parts[1].add_(other[1]).addcmul_(apart, apart, value=(total - count) * count / total)
        for moment, part in zip(self._moments, parts, strict=True):
            moment.copy_(part)


def gather_rows(processes: Processes, rows: Tensor, places: list[int], total: int) -> Tensor:
    """Brings together a matrix whose rows lie on different processes.

    Args:
        processes: The processes of the run.
        rows: Rows of this process, shape (k, d).
        places: Where they belong, k integers in [0, total).
        total: Rows of all processes.

    Returns:
        The matrix, shape (total, d), the same on all processes.
    """
    whole = rows.new_zeros(total, rows.shape[1])
    whole.index_copy_(0, torch.tensor(places, dtype=torch.long, device=rows.device), rows)
    processes.sum(whole, what="rows")  # each row and zeros: exact
    return whole


def gather_counts(engine: Engine) -> None:
    """Adds up what an engine has counted in a round, and settles who diverged.

    Raises:
        FederatedError: If more of the cohort has diverged than the trainer's ``max_diverged`` allows.
    """
    processes, start, watch = engine.trainer.processes, engine.start_gradients, engine.divergence
    if processes.size == 1:
        return
    counts = (engine.samples, engine.end_samples, start.samples, engine.max_steps)
    everyone = processes.exchange((counts, watch.clients, engine.assignment.keeps), "counts")
    samples, end_samples, start_samples, steps = zip(*(part[0] for part in everyone), strict=True)
    engine.samples, engine.end_samples, start.samples = sum(samples), sum(end_samples), sum(start_samples)
    engine.max_steps = max(steps)
    engine.assignment.note_use([part[2] for part in everyone])
    watch.settle(sorted(client for part in everyone for client in part[1]))


@contextmanager
def apart(trainer: FederatedTrainer, recorder: MetricRecorder) -> Iterator[None]:
    """Lets each process do its own part of some work, and brings together what is logged meanwhile.

    What was logged before was logged by all alike, and counts once.

    Args:
        trainer: The trainer.
        recorder: Takes what is logged.
    """
    if trainer.processes.size == 1:
        yield
        return
    if trainer.processes.rank > 0:
        recorder.series = {}
    with trainer.processes.apart():
        yield
    assert trainer.lightning_module is not None
    _gather_logged(trainer.processes, trainer.lightning_module, recorder)


def _gather_logged(processes: Processes, module: LightningModule, recorder: MetricRecorder) -> None:
    places = {id(part): name for name, part in module.named_modules() if isinstance(part, Metric)}
    metrics = {
        key: (places.get(id(metric)), options, None if last is None else last.cpu())
        for key, (metric, options, last) in recorder.metrics.items()
    }
    recorder.read()
    everyone = processes.exchange((recorder.position, recorder.series, metrics), "logged")
    order = sorted(range(processes.size), key=lambda rank: everyone[rank][0])
    recorder.series = _merge([series for _, series, _ in everyone], order)
    recorder.metrics = _find([everyone[rank][2] for rank in order], recorder, module)
    for part in module.modules():
        if isinstance(part, Metric):  # a value that was kept is that of this process alone, or of another time
            part._computed = None


def _merge(parts: list[dict[str, Series]], order: list[int]) -> dict[str, Series]:
    """Merges what was logged by name; the last in ``order`` that logged it gives the last value.

    The module's own value of a name goes before the default one.
    """
    own = {key for part in parts for key, series in part.items() if not series.is_default}
    kept = [{key: s for key, s in part.items() if not (s.is_default and key in own)} for part in parts]
    lasts = {key: series.last for rank in order for key, series in kept[rank].items()}
    merged: dict[str, Series] = {}
    for part in kept:
        for key, series in part.items():
            if key in merged:
                merged[key].merge(series)
            else:
                merged[key] = series
    for key, series in merged.items():
        series.last = lasts[key]
    return merged


def _find(
    parts: list[dict[str, tuple[str | None, LogOptions, Any]]], recorder: MetricRecorder, module: LightningModule
) -> dict[str, tuple[Metric, LogOptions, Any]]:
    """Finds the Metric objects that any process has logged, in an order that all share, as they compute together."""
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
    """Lets the module's Metric objects compute over all processes, but not while each works for itself."""
    if processes.size == 1:
        return
    for part in module.modules():
        if isinstance(part, Metric):
            part.distributed_available_fn = processes.are_together
            part.dist_sync_fn = processes.gather_tensor
