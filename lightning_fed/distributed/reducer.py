"""Merges the updates of all processes once a round, so that all go on with the same numbers, bit for bit."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_fed.core.reduction import Kind, RoundReducer, is_averaged
from lightning_fed.core.updates import Client, ReducedUpdate
from lightning_fed.distributed.processes import Processes

__all__ = ["SharedReducer", "gather_rows", "make_reducer"]

# A client of the round, its weight, its distance, its loss if that is needed, and what its process was sent besides.
_Entry: TypeAlias = tuple[Client, float, float, float | None, dict[str, Kind]]


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
