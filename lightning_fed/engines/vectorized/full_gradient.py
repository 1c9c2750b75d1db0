"""The gradients of many clients' losses over all their training data, at once."""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_fed.core.devices import to_device
from lightning_fed.core.seeding import Purpose, seed_everywhere, seed_for
from lightning_fed.core.train_state import LocalOptions, TrainState
from lightning_fed.core.updates import Client
from lightning_fed.engines.full_gradient import FullGradient
from lightning_fed.engines.vectorized.batches import LaneBatches
from lightning_fed.engines.vectorized.refusals import attempt, tell
from lightning_fed.engines.vectorized.step import StackedStep

__all__ = ["StackedFullGradient"]


class StackedFullGradient(FullGradient):
    """Computes what ``FullGradient`` computes, of a chunk of clients at once.

    If memory runs out, half as many clients go at once from then on; after any other error, one after another.
    The module's draws from torch's random streams differ between clients, and from those of a client alone.

    Args:
        step: Computes the gradients of a batch of each.
        chunk_size: Clients at once; fewer if batches are larger than in training.
    """

    def __init__(self, state: TrainState, options: LocalOptions, step: StackedStep, chunk_size: int) -> None:
        super().__init__(state, options)
        self.step, self.chunk_size = step, chunk_size
        self._most = self._tried = chunk_size  # most clients of a pass, and those of the last pass

    def _try(self, compute: Callable[[], Tensor]) -> Tensor | None:
        """Returns the result; None if the computation fails now (the reason is printed), or has failed before."""
        while self._most:
            found, reason, fewer = attempt(compute, lambda: self._tried)
            if found is not None:
                return found
            self._most, self.state.client = fewer, None
            how = f"in chunks of {fewer}" if fewer else "one client after another"
            tell(f"Gradients over a client's full data: {how} from round {self.state.round} on, as {reason}.")
        return None

    def compute_at_start(self, clients: tuple[Client, ...], out: Tensor | None) -> Tensor:
        losses = self._try(lambda: self._compute_at_start(clients, out))
        return super().compute_at_start(clients, out) if losses is None else losses

    def _compute_at_start(self, clients: tuple[Client, ...], out: Tensor | None) -> Tensor:
        vector = self.state.vector
        vector.data.copy_(self.state.weights)
        losses = []
        for first in range(0, len(clients), self.chunk_size):
            chunk = clients[first : first + self.chunk_size]
            weights = vector.data.expand(len(chunk), -1)
            if self.state.num_personal:
                own = vector.personal.new_empty(len(chunk), self.state.num_personal)
                for client, row in zip(chunk, own, strict=True):
                    self.state.load_own(client.id, row)
                weights = torch.cat([weights, own], dim=1)
            rows = None if out is None else out[first : first + len(chunk)]
            losses.append(self._compute_at(weights, self._buffers_of(chunk), chunk, rows))
        return torch.cat(losses) if losses else self.state.weights.new_empty(0)

    def _buffers_of(self, clients: tuple[Client, ...]) -> dict[str, Tensor]:
        """Returns the buffers that clients start from by name, each of shape (n, ...)."""
        buffers, found = self.state.buffers, []
        for client in clients if buffers.policy == "local" else clients[:1]:
            buffers.load(client)
            found.append(buffers.live.copy())
        rows = {name: torch.stack([one[name] for one in found]) for name in found[0]}
        return {name: value.expand(len(clients), *value.shape[1:]) for name, value in rows.items()}

    def compute_at(
        self, weights: Tensor, buffers: dict[str, Tensor], clients: tuple[Client, ...], out: Tensor
    ) -> Tensor | None:
        """Computes ∇f_i of clients at weights of their own, into ``out``, shape (n, d).

        Weights have the shape (n, d + p).
        Their buffers, shape (n, ...), are left as they are. Returns f_i, shape (n,); None if it cannot be done at once.
        """
        return self._try(lambda: self._compute_at(weights, buffers, clients, out))

    def _compute_at(
        self, weights: Tensor, buffers: dict[str, Tensor], clients: tuple[Client, ...], out: Tensor | None
    ) -> Tensor:
        trained = self.state.source.batch_size
        size = max(trained, min(self.size, max(client.num_samples for client in clients)))
        count = min(self._most, max(1, self.chunk_size * trained // size))
        losses = []
        for at in range(0, len(clients), count):
            rows = slice(at, at + count)
            kept, part = {k: b[rows] for k, b in buffers.items()}, None if out is None else out[rows]
            losses.append(self._pass(weights[rows], kept, clients[rows], part))
        if out is not None:
            self._complete(weights, out)
        return torch.cat(losses)

    def _pass(
        self, weights: Tensor, buffers: dict[str, Tensor], clients: tuple[Client, ...], out: Tensor | None
    ) -> Tensor:
        """Computes the gradients of a few clients, if asked for, without weight decay; returns their losses."""
        self._tried = len(clients)
        batches = LaneBatches(self.state, self.options, clients, self.step.reads_batch_idx, whole=self.size)
        sizes = [client.num_samples for client in batches.clients]
        lanes, counts = to_device(torch.tensor([batches.order, sizes]), weights.device)
        samples = counts.to(self.wide)
        weights = weights if weights.stride(0) == 0 else weights[lanes]  # one vector for all
        buffers = {name: rows[lanes] for name, rows in buffers.items()}
        gradients = None if out is None else weights.new_empty(weights.shape)
        losses: Tensor = samples.new_zeros(len(clients))
        if out is not None:
            out.zero_()
        with self._unnoticed(clients):
            seed_everywhere(seed_for(self.state.seed, Purpose.GRADIENT, clients[0].round, clients[0].id))
            for step in range(batches.steps[0]):
                for run in batches.groups(step):
                    at, found = run.lanes, None if gradients is None else gradients[run.lanes]
                    kept = {name: rows[at] for name, rows in buffers.items()}
                    self.step(weights[at], kept, run.batch, run.batch_idx, run.size, found)
                    shares = run.size / samples[at]
                    if out is not None and found is not None:
                        out.index_add_(0, lanes[at], found[:, : out.shape[1]].to(out.dtype).mul_(shares[:, None]))
                    losses.index_add_(0, lanes[at], self.step.losses * shares)
        return losses
