"""How processes share a cohort: who trains whom, and how updates and logs become one, with the same bits for all."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heapreplace
from typing import Any, NamedTuple, TypeAlias

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch import distributed as dist
from torchmetrics import Metric

from lightning_fed.core.buffers import GlobalBuffers
from lightning_fed.core.client_states import ClientStates
from lightning_fed.core.logged_values import LoggedValue, LogOptions
from lightning_fed.core.recorder import MetricRecorder
from lightning_fed.core.reduction import Kind, RoundReducer, is_averaged
from lightning_fed.core.updates import Client, Cohort, ReducedUpdate
from lightning_fed.distributed.processes import Processes
from lightning_fed.errors import FederatedError

__all__ = [
    "Assignment", "Logged", "SharedReducer", "assign_clients", "gather_logged", "gather_rows", "logged_here",
    "logging_alone", "make_reducer", "merge_logged", "sync_metrics",
]  # fmt: skip

# A client of the round, its weight, its distance, its loss if that is needed, and what its process was sent besides.
_Entry: TypeAlias = tuple[Client, float, float, float | None, dict[str, Kind]]


def assign_clients(clients: Sequence[Client], size: int, most: int | None = None) -> list[tuple[Client, ...]]:
    """Divides clients over processes: the largest client first, each to the process with the least work so far.

    The result depends only on the arguments; ties go to the smaller client id and the smaller rank. The busiest process
    gets at most 4/3 of the work of the busiest process in the best division (Graham, 1969). A client counts at most
    ``most`` samples, for when all clients take the same number of steps. Client ids ascend within each process.
    """

    def work(client: Client) -> int:
        return client.num_samples if most is None else min(client.num_samples, most)

    loads = [(0, rank) for rank in range(size)]
    shares: list[list[Client]] = [[] for _ in range(size)]
    for client in sorted(clients, key=lambda client: (-work(client), client.id)):
        load, rank = loads[0]
        shares[rank].append(client)
        heapreplace(loads, (load + work(client), rank))
    return [tuple(sorted(share, key=lambda client: client.id)) for share in shares]


class Assignment:
    """Divides the cohort of each round, and moves client state to the process that trains the client next.

    The newest state of a client is in the process that trained it last, or in the files of the checkpoint that the run
    was resumed from, which all processes can read.

    Args:
        processes: The processes of the run.
        keepers: The objects that hold client state, already restored.
        most: See ``assign_clients``.
    """

    def __init__(
        self, processes: Processes, keepers: tuple[ClientStates | GlobalBuffers, ...], most: int | None = None
    ) -> None:
        self._processes, self._keepers, self._most = processes, keepers, most
        self._shares: list[tuple[Client, ...]] = []
        self._targets: dict[int, int] = {}
        self._holders: dict[int, int] = {}
        self._in_use = self.keeps  # after a restart all processes read the same files

    @property
    def keeps(self) -> bool:
        """Whether this process holds any client state."""
        return any(keeper.in_use for keeper in self._keepers)

    def own(self, cohort: Cohort) -> tuple[Client, ...]:
        """Returns the clients of the cohort that this process trains, after their state has arrived here."""
        if self._processes.size == 1:
            return cohort.clients
        self._shares = assign_clients(cohort.clients, self._processes.size, self._most)
        self._targets = {client.id: target for target, share in enumerate(self._shares) for client in share}
        if self._in_use:
            self._hand_over()
        return self._shares[self._processes.rank]

    def elsewhere(self, client: int) -> bool:
        """Says whether another process trains a client in this round, or has its state from an earlier round."""
        rank = self._processes.rank
        return self._targets.get(client, self._holders.get(client, rank)) != rank

    def take_note(self, keep: Sequence[bool]) -> None:
        """Records after a round which processes hold client state; while none does, there is nothing to move."""
        self._in_use = any(keep)
        if self._in_use:
            for rank, share in enumerate(self._shares):
                self._holders.update((client.id, rank) for client in share)

    def _hand_over(self) -> None:
        """Moves client state from the process that has it to the one that trains the client; others drop their copy.

        All processes receive it in an exchange; a process that fails to provide it sends its error instead.
        """
        rank = self._processes.rank
        targets = self._targets
        moving = [client for client, target in targets.items() if self._holders.get(client, target) != target]
        everyone: list[dict[int, list[Any]]] = []
        if moving:
            own = [client for client in moving if self._holders[client] == rank]
            moved = {client: [keeper.move_out(client) for keeper in self._keepers] for client in own}
            everyone = self._processes.exchange(moved, "client state")
        for client, target in targets.items():
            if target != rank:
                for keeper in self._keepers:
                    keeper.drop(client)
        arrived = {client: parts for part in everyone for client, parts in part.items() if targets[client] == rank}
        for client, parts in arrived.items():
            for keeper, part in zip(self._keepers, parts, strict=True):
                keeper.move_in(client, part)


def make_reducer(processes: Processes, averaged: Callable[[], dict[str, Tensor]], *args: Any) -> RoundReducer:
    """Makes the reducer of a round for the processes of the run; see ``SharedReducer``."""
    return RoundReducer(*args) if processes.size == 1 else SharedReducer(processes, averaged, *args)


class SharedReducer(RoundReducer):
    """Adds up what each process has reduced over its own clients; an exchange must have come directly before.

    Args:
        processes: The processes of the run.
        averaged: Returns the module's buffers by name, if they are averaged.
        *args: See ``RoundReducer``.

    Attributes:
        everyone: The clients of each process that entered the round, with weight, distance and loss.
    """

    def __init__(self, processes: Processes, averaged: Callable[[], dict[str, Tensor]], *args: Any) -> None:
        super().__init__(*args)
        self._processes, self._averaged = processes, averaged
        self.everyone: list[list[_Entry]] = []

    def entries(self) -> list[_Entry]:
        """Returns the clients of this process that entered the round."""
        losses = torch.stack(self._losses).tolist() if self._losses else [None] * len(self._clients)
        sent = [self._sent] * len(self._clients)
        return list(zip(self._clients, self._weights, self._distances, losses, sent, strict=True))

    def reduce(self, round: int) -> ReducedUpdate:
        entries = sorted((entry for part in self.everyone for entry in part), key=lambda entry: entry[0].id)
        if not entries:
            return super().reduce(round)
        self._merge_moments([len(part) for part in self.everyone])
        rows, place = self._rows, {client.id: at for at, (client, *_) in enumerate(entries)}
        places = [place[client.id] for client in self._clients]
        self._rows = {
            need: gather_rows(self._processes, own[: len(places)], places, len(entries)) for need, own in rows.items()
        }
        self._clients, self._weights, self._distances, losses, sent = (
            list(part) for part in zip(*entries, strict=True)
        )
        self._add_up({name: kind for kinds in sent for name, kind in kinds.items()})
        self._losses = [torch.tensor(loss, dtype=torch.float64) for loss in losses if loss is not None]
        update = super().reduce(round)
        self._rows = rows
        return update

    def _add_up(self, sent: dict[str, Kind]) -> None:
        """Adds sums and buffers over the processes; a process without a client has no buffers yet."""
        live = self._averaged()
        added = [name for name, buffer in live.items() if is_averaged(buffer)]
        for name in added:
            wider = torch.promote_types(live[name].dtype, torch.float64)
            self._buffers.setdefault(name, torch.zeros_like(live[name], dtype=wider))
        parts = [*(value.close() for value in self._sums.values()), *(self._buffers[name] for name in added)]
        beside = [self._sum_of(name, kind).close() for name, kind in sorted(sent.items())]
        for added_up in (parts, beside):
            for dtype in sorted({part.dtype for part in added_up}, key=str):
                self._processes.sum(*(part for part in added_up if part.dtype == dtype), what=None)
        self._take_maxima({name: buffer for name, buffer in live.items() if name not in added})

    def _take_maxima(self, live: dict[str, Tensor]) -> None:
        lowest = torch.iinfo(torch.int64).min
        none = {name: torch.full_like(one, lowest, dtype=torch.int64) for name, one in live.items()}
        wide = {name: self._buffers.get(name, other).long() for name, other in none.items()}
        self._processes.reduce(list(wide.values()), dist.ReduceOp.MAX)
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
                difference = other[0].sub_(parts[0])
                parts[0].add_(difference, alpha=count / total)
                parts[1].add_(other[1])
                parts[1].addcmul_(difference, difference, value=(total - count) * count / total)
        for moment, part in zip(self._moments, parts, strict=True):
            moment.copy_(part)


def gather_rows(processes: Processes, rows: Tensor, places: list[int], total: int) -> Tensor:
    """Gathers a matrix whose rows are on different processes; an exchange must have come directly before.

    This process has ``rows``, shape (k, d), for the indices ``places``; all get the whole matrix, shape (total, d).
    """
    whole = rows.new_zeros(total, rows.shape[1])
    whole.index_copy_(0, torch.tensor(places, dtype=torch.long, device=rows.device), rows)
    processes.sum(whole, what=None)  # exact, as each row is added to zeros
    return whole


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
