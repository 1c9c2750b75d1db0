"""What a round keeps of its clients' updates: running sums, so that memory does not grow with the cohort."""

import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_fed.core.devices import copy_each, on_each, wide_dtype
from lightning_fed.core.updates import Client, Need, ReducedUpdate, Update
from lightning_fed.errors import FederatedError

__all__ = ["LongSum", "RoundReducer", "is_averaged"]

# How many vectors are added up in single precision before their sum is added to one in double precision.
_BLOCK = 32
# Shape and dtype of what clients send besides their updates.
Kind: TypeAlias = tuple[torch.Size, torch.dtype]


class LongSum:
    """Adds up tensors in ``total``, zeros at first; beyond 32, sums of blocks of 32 are added in double precision.

    Single numbers are added up one by one.
    """

    def __init__(self, total: Tensor) -> None:
        self.total, self._count, self._block = total, 0, _BLOCK if total.dim() else sys.maxsize
        self._blocks = total.new_empty(0, dtype=torch.promote_types(total.dtype, wide_dtype(total.device)))

    def reset(self) -> None:
        """Begins anew."""
        self.total.zero_()
        self._blocks.zero_()
        self._count = 0

    def add(self, value: Tensor, alpha: float = 1.0) -> None:
        """Adds ``alpha`` times a vector."""
        if self._count == self._block:
            self._end_block()
        self.total.add_(value, alpha=alpha)
        self._count += 1

    def _end_block(self) -> None:
        if not len(self._blocks):
            self._blocks = torch.zeros_like(self.total, dtype=self._blocks.dtype)
        self._blocks.add_(self.total)
        self.total.zero_()
        self._count = 0

    def close(self) -> Tensor:
        """Returns ``total`` with the whole sum."""
        if len(self._blocks):
            self._end_block()
            self.total.copy_(self._blocks)
            self._blocks.zero_()
        return self.total


def _gradient(update: Update) -> Tensor:
    if update.gradient is None:
        raise FederatedError(
            f"Expected client {update.client.id} to send a gradient, got none: set `gradient_at` of the class given as "
            "`--aggregator`."
        )
    return update.gradient


# How each running sum takes in one update; ``scratch`` is a (d,) vector to work in.
_ADD: dict[Need, Callable[[LongSum, Update, Tensor], object]] = {
    Need.MEAN: lambda total, u, scratch: total.add(u.delta, u.weight),
    Need.SUM: lambda total, u, scratch: total.add(u.delta),
    Need.ABS_SUM: lambda total, u, scratch: total.add(torch.abs(u.delta, out=scratch)),
    Need.SIGN_SUM: lambda total, u, scratch: total.add(torch.sign(u.delta, out=scratch)),
    Need.WEIGHTED_SIGN_SUM: lambda total, u, scratch: total.add(torch.sign(u.delta, out=scratch), u.client.num_samples),
    Need.NORMALIZED_MEAN: lambda total, u, scratch: total.add(u.delta, u.weight / u.optimizer_distance),
    Need.GRADIENT_MEAN: lambda total, u, scratch: total.add(_gradient(u), u.weight),
    Need.GRADIENT_SIGN_SUM: lambda total, u, scratch: total.add(torch.sign(_gradient(u), out=scratch)),
}
_WEIGHTED = (Need.MEAN, Need.NORMALIZED_MEAN, Need.GRADIENT_MEAN)
_ROWS = (Need.UPDATES, Need.GRADIENTS)
_WITHOUT_SCRATCH = Need.MEAN | Need.SUM | Need.UPDATES | Need.ANY_LOSS


class RoundReducer:
    """Accumulates client updates into vectors that are allocated once and reused every round.

    Args:
        like: The global vector w, shape (d,): sums take its dtype (float32 or wider) and device.
        needs: What to keep.
        num_registered: N, all clients of the data set that hold samples.
    """

    def __init__(self, like: Tensor, needs: Need, num_registered: int = 0) -> None:
        self.needs = needs
        self.num_registered = num_registered
        self._sums = {need: LongSum(torch.zeros_like(like)) for need in _ADD if need in needs}
        if Need.WEIGHTED_SIGN_SUM in needs:  # sums of samples are integers beyond what float32 holds
            self._sums[Need.WEIGHTED_SIGN_SUM] = LongSum(torch.zeros_like(like, dtype=wide_dtype(like.device)))
        self._scratch = torch.empty_like(like) if needs & ~_WITHOUT_SCRATCH else like.new_empty(0)
        self._takes_losses = bool(needs & (Need.GRADIENTS | Need.ANY_LOSS))  # once here, as combining flags is slow
        self._rows = {need: like.new_empty(0, like.numel()) for need in _ROWS if need in needs}
        self._like, self._beside, self._sent = like, dict[str, LongSum](), dict[str, Kind]()
        # Welford's running mean and sum of squared deviations.
        self._moments = [torch.zeros_like(like) for _ in range(2)] if Need.VARIANCE in needs else []
        self.reset(0)

    def reset(self, cohort_size: int) -> None:
        """Empties the sums before a round of at most ``cohort_size`` clients."""
        self._beside = {name: self._beside[name] for name in self._sent}  # names may change from round to round
        for total in (*self._sums.values(), *self._beside.values()):
            total.reset()
        for moment in self._moments:
            moment.zero_()
        for need, rows in self._rows.items():
            if len(rows) < cohort_size:
                self._rows[need] = rows.new_empty(cohort_size, rows.shape[1])
        self._clients: list[Client] = []
        self._weights: list[float] = []
        self._distances: list[float] = []
        self._losses: list[Tensor] = []
        self._buffers: dict[str, Tensor] = {}
        self._sent.clear()

    @property
    def last_id(self) -> int:
        """Id of the client that entered last, -1 before the first."""
        return self._clients[-1].id if self._clients else -1

    def add(self, update: Update, average_buffers: bool) -> None:
        """Adds one client's update; call in ascending order of client id."""
        for need, total in self._sums.items():
            _ADD[need](total, update, self._scratch)
        for name, value in update.sums.items():
            self._sum_of(name, (value.shape, value.dtype)).add(value, update.factors.get(name, 1.0))
        if self._moments:
            mean, squares = self._moments
            deviation = torch.sub(update.delta, mean, out=self._scratch)
            mean.add_(deviation, alpha=1 / (len(self._clients) + 1))
            squares.addcmul_(deviation, update.delta - mean)
        if Need.UPDATES in self._rows:
            self._rows[Need.UPDATES][len(self._clients)].copy_(update.delta)
        if Need.GRADIENTS in self._rows:
            self._rows[Need.GRADIENTS][len(self._clients)].copy_(_gradient(update))
        if self._takes_losses:
            unknown = update.delta.new_full((), torch.nan)  # the loss of a last step is not kept
            self._losses.append(unknown if update.loss is None else update.loss.detach().clone())
        if average_buffers and update.buffers:
            self._add_buffers(update)
        self._clients.append(update.client)
        self._weights.append(update.weight)
        self._distances.append(update.optimizer_distance)

    def totals(self) -> dict[str, Tensor]:
        """Returns the running sums as they are, by what they are sums of."""
        needed = {f"need.{need.name}": total.close() for need, total in self._sums.items()}
        return needed | {f"sum.{name}": self._beside[name].close() for name in self._sent}

    def take(self, clients: Sequence[tuple[Client, float, float]], totals: dict[str, Tensor]) -> None:
        """Takes ``totals`` that others have added up over clients, of which come id, weight and distance."""
        for client, weight, distance in clients:
            self._clients.append(client)
            self._weights.append(weight)
            self._distances.append(distance)
        for need, total in self._sums.items():
            total.add(totals.pop(f"need.{need.name}"))
        for name, value in totals.items():
            self._sum_of(name.removeprefix("sum."), (value.shape, value.dtype)).add(value)

    def _sum_of(self, name: str, kind: Kind) -> LongSum:
        """Returns the sum of what clients send under a name; refuses tensors of two kinds."""
        if (known := self._sent.setdefault(name, kind)) != kind:
            raise FederatedError(
                f"Expected all clients to send tensors of one shape and dtype as {name!r}, got {known} and {kind}: "
                "give each its own name in `update.send`."
            )
        total = self._beside.get(name)
        if total is None or (total.total.shape, total.total.dtype) != kind:
            total = self._beside[name] = LongSum(self._like.new_zeros(kind[0], dtype=kind[1]))
        return total

    def _add_buffers(self, update: Update) -> None:
        averaged = {name: buffer for name, buffer in update.buffers.items() if is_averaged(buffer)}
        others = {name: buffer for name, buffer in update.buffers.items() if name not in averaged}
        self._begin_buffers({name: buffer for name, buffer in update.buffers.items() if name not in self._buffers})
        sums, values = [self._buffers[name] for name in averaged], list(averaged.values())
        if values and values[0].device.type != "cpu":  # a GPU adds a list in one kernel only if it has one dtype
            wide = [torch.empty_like(total) for total in sums]
            copy_each(wide, values)
            values = wide
        on_each("add_", sums, values, alpha=update.weight)
        on_each("clamp_min_", (self._buffers[name] for name in others), others.values())

    def _begin_buffers(self, values: dict[str, Tensor]) -> None:
        """Starts the sums of averaged buffers at 0 and the maxima of others at the first client's values."""
        for name, value in values.items():
            # In double precision, if all clients have the same buffer, the mean is that buffer to the bit.
            wide = torch.promote_types(value.dtype, wide_dtype(value.device)) if is_averaged(value) else value.dtype
            self._buffers[name] = torch.empty_like(value, dtype=wide)
        copy_each((self._buffers[name] for name in values), values.values())
        on_each("zero_", (self._buffers[name] for name, value in values.items() if is_averaged(value)))

    def begin_buffer(self, name: str, value: Tensor) -> None:
        """Starts the sum of a buffer that a later client changed first: clients that entered count with ``value``."""
        if self._clients and is_averaged(value):
            self._buffers[name] = value.to(wide_dtype(value.device)) * sum(self._weights)

    def reduce(self, round: int) -> ReducedUpdate:
        """Closes the round: divides the weighted sums by Σ weight; the tensors returned are reused in the next."""
        total, count = self._total_weight(), len(self._clients)
        sums = {need: value.close() for need, value in self._sums.items()}
        for need in _WEIGHTED:
            if need in sums and count:
                sums[need].div_(total)
        kept = {**sums, **{need: rows[:count] for need, rows in self._rows.items()}}
        named = {(need.name or "").lower(): value for need, value in kept.items()}
        if self._moments:
            named["variance"] = torch.div(self._moments[1], max(count - 1, 1), out=self._scratch)
        on_each("div_", filter(is_averaged, self._buffers.values()), args=(total,))
        if self._losses:
            named["losses"] = torch.stack(self._losses).cpu().double()
        return ReducedUpdate(
            round=round,
            clients=tuple(self._clients),
            num_registered=self.num_registered,
            weights=torch.tensor([weight / total for weight in self._weights], dtype=torch.float64),
            mean_distance=sum(w * a for w, a in zip(self._weights, self._distances, strict=True)) / total,
            buffers=self._buffers,
            sums={name: self._beside[name].close() for name in self._sent},
            noise=0.0,
            **named,
        )

    def _total_weight(self) -> float:
        total = sum(self._weights)
        if any(self._weights) and not 0 < total < float("inf"):  # without any weight the server takes no step
            raise FederatedError(
                f"Expected the clients' aggregation weights to sum to a positive number, got {total}: change "
                "`client_weight` of the class given as `--aggregator`."
            )
        return total or 1.0


def is_averaged(buffer: Tensor) -> bool:
    """Says whether a buffer is averaged over clients; others take the maximum."""
    return buffer.is_floating_point() or buffer.is_complex()
