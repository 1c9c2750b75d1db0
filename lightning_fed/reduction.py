"""What a round keeps of its clients' updates: running sums, so that memory does not grow with the cohort."""

from dataclasses import dataclass, field
from enum import Flag, auto

import torch
from torch import Tensor

from lightning_fed.errors import FederatedError
from lightning_fed.hooks import Client, Update

__all__ = ["Need", "ReducedUpdate", "RoundReducer"]


class Need(Flag):
    """What an aggregator or a mask asks the loop to reduce over the cohort.

    ``MEAN`` and ``SIGN_SUM`` are running (d,) vectors; ``UPDATES`` keeps the whole (n, d) matrix.
    """

    NOTHING = 0
    MEAN = auto()
    SIGN_SUM = auto()
    UPDATES = auto()


@dataclass
class ReducedUpdate:
    """The cohort's updates, reduced in ascending order of client id.

    Attributes:
        round: Round index, from 1.
        clients: The n clients that entered.
        weights: Their aggregation weights p_i, shape (n,), summing to 1.
        mean: Δ = Σ p_i δ_i, shape (d,), if ``Need.MEAN`` was asked for.
        sign_sum: Σ sign(δ_i), shape (d,), if ``Need.SIGN_SUM`` was asked for.
        updates: δ_i, shape (n, d), if ``Need.UPDATES`` was asked for.
        buffers: The reduced buffers by name (floating: weighted mean in double precision, integer: maximum); empty
            unless averaged.
    """

    round: int
    clients: tuple[Client, ...] = ()
    weights: Tensor = field(default_factory=lambda: torch.empty(0))
    mean: Tensor = field(default_factory=lambda: torch.empty(0))
    sign_sum: Tensor = field(default_factory=lambda: torch.empty(0))
    updates: Tensor = field(default_factory=lambda: torch.empty(0))
    buffers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_clients(self) -> int:
        """The number of clients that entered, n."""
        return len(self.clients)


class RoundReducer:
    """Accumulates client updates into vectors that are allocated once and reused every round.

    Args:
        like: The global vector w, shape (d,): sums take its dtype (float32 or wider) and device.
        needs: What to keep.
    """

    def __init__(self, like: Tensor, needs: Need) -> None:
        self.needs = needs
        self._mean = torch.zeros_like(like) if Need.MEAN in needs else like.new_empty(0)
        self._signs = torch.zeros_like(like) if Need.SIGN_SUM in needs else like.new_empty(0)
        self._scratch = torch.empty_like(like) if Need.SIGN_SUM in needs else like.new_empty(0)
        self._updates = like.new_empty(0, like.numel())
        self._clients: list[Client] = []
        self._weights: list[float] = []
        self._buffers: dict[str, Tensor] = {}

    def reset(self, cohort_size: int) -> None:
        """Empties the sums before a round of at most ``cohort_size`` clients."""
        self._mean.zero_()
        self._signs.zero_()
        self._clients, self._weights, self._buffers = [], [], {}
        if Need.UPDATES in self.needs and len(self._updates) < cohort_size:
            self._updates = self._updates.new_empty(cohort_size, self._updates.shape[1])

    def add(self, update: Update, average_buffers: bool) -> None:
        """Adds one client's update; call in ascending order of client id."""
        if Need.MEAN in self.needs:
            self._mean.add_(update.delta, alpha=update.weight)
        if Need.SIGN_SUM in self.needs:
            self._signs.add_(torch.sign(update.delta, out=self._scratch))
        if Need.UPDATES in self.needs:
            self._updates[len(self._clients)].copy_(update.delta)
        if average_buffers:
            self._add_buffers(update)
        self._clients.append(update.client)
        self._weights.append(update.weight)

    def _add_buffers(self, update: Update) -> None:
        for name, buffer in update.buffers.items():
            so_far = self._buffers.get(name)
            if not _is_averaged(buffer):
                self._buffers[name] = buffer.clone() if so_far is None else torch.maximum(so_far, buffer, out=so_far)
                continue
            if so_far is None:
                # In double precision the mean of a buffer that all clients agree on is that buffer, to the bit.
                wide = torch.float32 if buffer.device.type == "mps" else torch.float64
                so_far = torch.zeros_like(buffer, dtype=torch.promote_types(buffer.dtype, wide))
                self._buffers[name] = so_far
            so_far.add_(buffer, alpha=update.weight)

    def reduce(self, round: int) -> ReducedUpdate:
        """Closes the round: divides the sums by Σ weight.

        Returns:
            The reduced update; its tensors are reused in the next round.

        Raises:
            FederatedError: If the clients' weights do not sum to a positive number.
        """
        total = sum(self._weights)
        if self._clients and not 0 < total < float("inf"):
            raise FederatedError(
                f"Expected the clients' aggregation weights to sum to a positive number, got {total}: change "
                "`client_weight` of the class given as `--aggregator`."
            )
        if self._clients and Need.MEAN in self.needs:
            self._mean.div_(total)
        return ReducedUpdate(
            round=round,
            clients=tuple(self._clients),
            weights=torch.tensor([weight / total for weight in self._weights], dtype=torch.float64),
            mean=self._mean,
            sign_sum=self._signs,
            updates=self._updates[: len(self._clients)],
            buffers={n: b.div_(total) if _is_averaged(b) else b for n, b in self._buffers.items()},
        )


def _is_averaged(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()
