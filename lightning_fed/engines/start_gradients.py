"""What methods ask for besides updates: gradients and losses of clients, at the global model and where they end."""

from typing import Literal

import numpy as np
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_fed.aggregators.base import Aggregator
from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.core.devices import to_device
from lightning_fed.core.hooks import FederatedCallback, HookCaller
from lightning_fed.core.reduction import LongSum
from lightning_fed.core.train_state import LocalOptions, TrainState
from lightning_fed.core.updates import Client, Cohort, Need, RoundCounts, StartGradient, Update
from lightning_fed.data.batch_sources import BatchSource
from lightning_fed.distributed.sharing import gather_rows
from lightning_fed.distributed.strategy import processes_of
from lightning_fed.engines.divergence import DivergenceWatch
from lightning_fed.engines.full_gradient import FullGradient
from lightning_fed.errors import FederatedError

__all__ = ["ClientGradients", "ComputedStartGradients", "asks_for_full_gradients"]

_LEVELS: tuple[StartGradient, ...] = ("none", "client", "cohort")


def asks_for_full_gradients(callback: Callback) -> bool:
    """Says whether a callback may ask for gradients or losses over the clients' full data, where they start or end."""
    defaults = (None, FederatedCallback.start_gradients, Aggregator.start_gradients)
    if getattr(type(callback), "start_gradients", None) not in defaults:
        return True
    if not isinstance(callback, Aggregator):
        return False
    by_gradient = bool(callback.all_needs & Need.ANY_GRADIENT) and callback.gradient_at != "last_step"
    return by_gradient or callback.reads_start_losses


class ComputedStartGradients:
    """Computes what ``StartGradients`` says, once for every part that asks.

    Attributes:
        level: The most that any part asks for in this round.
        method_level: The most that an algorithm asks for; diagnostics do not count.
        exchanged: Whether an algorithm, not only a diagnostic, had the cohort's gradients exchanged in this round.
        full_gradient: Computes the gradients, one client after another, unless who trains clients sets another.
        wants_losses: Whether the aggregator asks for f_i(w) over training samples.
        losses_alone: Whether f_i(w) needs its own pass in this round, because no part asks for gradients at w.
        own_losses: Computes f_i for the aggregator where that is not f_i(w) over training samples, else None.
        given: On a node of a fleet, the exchange that the server has made: its clients, rows and losses of those here,
            and the mean. The server counts it.
    """

    def __init__(self, state: TrainState, options: LocalOptions, hooks: HookCaller, counts: RoundCounts) -> None:
        self.state, self.hooks, self.counts = state, hooks, counts
        self.aggregator: Aggregator = hooks.trainer.aggregator
        self.full_gradient = FullGradient(state, options, _gradients_over(hooks))
        self.processes = processes_of(state.fabric)
        self.level: StartGradient = "none"
        self.method_level: StartGradient = "none"
        self.exchanged = False
        self.wants_losses, self.losses_alone = self.aggregator.reads_start_losses, False
        self.own_losses: FullGradient | None = None
        self.given: tuple[tuple[Client, ...], Tensor, Tensor, Tensor] | None = None
        if self.aggregator.all_needs & Need.ANY_LOSS and not self.wants_losses:
            held_out = _held_out(state, hooks) if self.aggregator.losses_over == "held_out" else None
            self.own_losses = FullGradient(state, options, held_out=held_out)
        self._here: tuple[Client, ...] = ()
        self.clients: tuple[Client, ...] = ()
        none = state.weights.new_empty(0)
        self.gradient = self.loss = self.mean = self._losses = none
        self._rows = state.weights.new_empty(0, state.weights.numel())
        self.weights = torch.empty(0, dtype=torch.float64)
        self._own, self._all_rows, self._mean = none, self._rows, none
        self._gathered: tuple[Tensor, Tensor] | None = None
        self._at: dict[int, int] = {}

    @property
    def rows(self) -> Tensor:
        """The clients' g_i in ascending order of client id, shape (n, d)."""
        return self._gather()[0] if self.processes.size > 1 else self._rows

    @property
    def losses(self) -> Tensor:
        """Their f_i, shape (n,)."""
        return self._gather()[1] if self.processes.size > 1 else self._losses

    def _gather(self) -> tuple[Tensor, Tensor]:
        if self._gathered is None:
            processes, total = self.processes, len(self.clients)
            processes.exchange(None, "start gradients")
            place = {client.id: at for at, client in enumerate(self.clients)}
            places = [place[client] for client in self._at]
            rows = gather_rows(processes, self._rows, places, total)
            self._gathered = rows, gather_rows(processes, self._losses[:, None], places, total)[:, 0]
        return self._gathered

    def _level(self, round: int, kinds: tuple[type[Callback], ...]) -> StartGradient:
        asked = [
            callback.start_gradients(round)
            for callback in self.hooks.callbacks
            if isinstance(callback, FederatedCallback) and isinstance(callback, kinds)
        ]
        return max(asked, key=_LEVELS.index, default="none")

    def begin_round(self, cohort: Cohort, own: tuple[Client, ...]) -> Tensor | None:
        """Finds out what this round needs and computes the cohort's gradients, if they are asked for.

        Args:
            cohort: The round's clients.
            own: Those of this process.

        Returns:
            ‖g_i‖ + f_i for each client of ``own``, shape (k,): not finite where the gradient cannot be used. None if no
            algorithm asks for the cohort's: a diagnostic leaves no client out.
        """
        self._here = own
        self.level = self._level(cohort.round, (Callback,))
        self.method_level = self._level(cohort.round, (ClientAlgorithm, Aggregator))
        self.exchanged = self.method_level == "cohort"
        self.losses_alone = self.wants_losses and self.level == "none"
        if self.wants_losses and self.method_level == "none" and self.given is None:
            self.counts.gradients += sum(map(self.full_gradient.count, own))
        self.clients, self._at = (), {}
        if self.level == "client" and not len(self._own):
            self._own = torch.empty_like(self.state.weights)
        if self.level != "cohort" or not cohort.clients:
            return None
        if self.given is not None:
            clients, rows, losses, mean = self.given
            self._arrange(own, clients, rows, losses)
            self.mean = mean
            return None
        rows = self._room_for(own)
        with self.processes.working_alone():
            losses = self.compute(own, rows)
        self._arrange(own, cohort.clients, rows, losses)
        if not self.exchanged:
            return None
        return self.sizes_at(own)

    def compute(self, clients: tuple[Client, ...], out: Tensor) -> Tensor:
        """Computes the gradients at w of some clients, shape (n, d); returns their losses there, shape (n,)."""
        self._count(clients)
        return self.full_gradient.compute_at_start(clients, out)

    def losses_now(self, clients: tuple[Client, ...]) -> Tensor:
        """Computes f_i of clients of the round at the global model as it is now, shape (n,); see ``StartGradients``."""
        computes = self.own_losses or self.full_gradient
        self.counts.gradients += sum(map(computes.count, clients))
        own = {client.id for client in self._here}
        here = tuple(client for client in clients if client.id in own)
        found = zip((client.id for client in here), computes.compute_at_start(here, None).tolist(), strict=True)
        self.state.load_global_model()
        everyone = self.processes.exchange(dict(found), "losses")
        losses = {client: loss for part in everyone for client, loss in part.items()}
        return torch.tensor([losses[client.id] for client in clients], dtype=torch.float64)

    def look_at(self, clients: tuple[Client, ...], out: Tensor) -> None:
        """Computes the gradients at w of any clients, shape (n, d), without counting them."""
        self.full_gradient.compute_at_start(clients, out)

    def _count(self, clients: tuple[Client, ...]) -> None:
        if self.method_level != "none":
            self.counts.gradients += sum(map(self.full_gradient.count, clients))

    def _arrange(self, own: tuple[Client, ...], clients: tuple[Client, ...], rows: Tensor, losses: Tensor) -> None:
        """Keeps the gradients of this process's clients, and averages all with the aggregator's weights."""
        self.clients, self._rows, self._losses, self._gathered = clients, rows, losses, None
        self._at = {client.id: at for at, client in enumerate(own)}
        weights = [self.aggregator.update_weight(client) for client in clients]
        self.weights = torch.tensor(weights, dtype=torch.float64) / (sum(weights) or 1.0)
        if not len(self._mean):
            self._mean = torch.empty_like(self.state.weights)
        total = LongSum(self._mean.zero_())
        for client, weight in zip(clients, self.weights.tolist(), strict=True):  # in this order
            if client.id in self._at:
                total.add(rows[self._at[client.id]], weight)
        self.mean = total.close()
        self.processes.sum(self.mean)

    def keep(self, own: tuple[Client, ...]) -> None:
        """Leaves clients out of the exchange: of this process's own only these remain, in the same order."""
        index = [self._at[client.id] for client in own]
        for to, at in enumerate(index):  # moves up in place, so that the matrix is never there twice
            if to != at:
                self._all_rows[to].copy_(self._all_rows[at])
        everyone = self.processes.exchange(own, "start gradients")
        clients = tuple(sorted((client for part in everyone for client in part), key=lambda client: client.id))
        self._arrange(own, clients, self._all_rows[: len(index)], self._losses[index])

    def take_ahead(self, clients: tuple[Client, ...]) -> None:
        """Computes what clients that train at once would take one by one in ``load``, before any of them starts."""
        if self.level == "client":
            self._rows = self._room_for(clients)
            self._losses = self.compute(clients, self._rows)
        elif self.losses_alone:
            self._losses = self.full_gradient.compute_at_start(clients, None)
        if self.level != "cohort":
            self._at = {client.id: at for at, client in enumerate(clients)}

    def row_of(self, client: Client) -> Tensor | None:
        """Returns g_i of a client of the exchange; None without one."""
        return self._rows[self._at[client.id]] if self.exchanged and client.id in self._at else None

    def load(self, client: Client) -> None:
        """Makes ``gradient`` and ``loss`` those of the client about to train; the live model holds w."""
        at = self._at.get(client.id)
        if self.level != "none":
            if at is None:
                self._count((client,))
                self.gradient, self.loss = self._own, self.full_gradient.compute(client, self._own)
            else:
                self.gradient, self.loss = self._rows[at], self._losses[at]
        elif self.losses_alone:
            self.loss = self.full_gradient.compute(client, None) if at is None else self._losses[at]

    def sizes_at(self, clients: tuple[Client, ...]) -> Tensor:
        """Returns ‖g_i‖ + f_i of clients whose gradients were taken before they trained, shape (n,)."""
        sizes: Tensor = torch.linalg.vector_norm(self._rows, dim=1)
        sizes, places = sizes + self._losses, [self._at[client.id] for client in clients]
        return sizes if places == [*range(len(sizes))] else sizes[to_device(torch.tensor(places), sizes.device)]

    def go_back(self, full_gradient: FullGradient) -> None:
        """Has gradients computed otherwise from here on, also those that were taken ahead."""
        self.full_gradient = full_gradient
        if self.level != "cohort":
            self._at, self._rows = {}, self._rows[:0].clone()
            self._all_rows = self._rows

    def _room_for(self, clients: tuple[Client, ...]) -> Tensor:
        """Returns a row for each client, of a matrix that grows."""
        if len(self._all_rows) < len(clients):
            self._all_rows = self._all_rows.new_empty(len(clients), self._all_rows.shape[1])
        return self._all_rows[: len(clients)]


class ClientGradients:
    """Completes updates by the gradient and the loss that the aggregator asks for.

    Attributes:
        at: Where each client's gradient is taken, None if none is asked for.
    """

    def __init__(self, start_gradients: ComputedStartGradients, divergence: DivergenceWatch) -> None:
        self.start_gradients, self.divergence, self.state = start_gradients, divergence, start_gradients.state
        self.counts, self.aggregator = start_gradients.counts, start_gradients.aggregator
        asked = self.aggregator.all_needs & Need.ANY_GRADIENT
        self.at = self.aggregator.gradient_at if asked else None
        if self.at not in (None, "start") and start_gradients.wants_losses:
            raise FederatedError(
                f"Expected `gradient_at` start of {type(self.aggregator).__name__}, which needs losses at the global "
                f"model too, got {self.at}: change the class given as `--aggregator`."
            )
        # A gradient that is not finite would spoil a sum; a method that gets every gradient checks them itself.
        self._sums = bool(asked & Need.GRADIENT_SUMS)
        self._taken = torch.empty_like(self.state.weights) if self.at == "end" else None

    def complete(self, update: Update, start: Tensor) -> bool:
        """Adds what is asked for and is not there yet, for the client in the resident module.

        Args:
            update: The client's update.
            start: Where the round's clients start, shape (d,).

        Returns:
            False if the client is left out, because the loss or the gradient is not finite.
        """
        client, given = update.client, self.start_gradients
        if self.at == "start":
            update.gradient, update.loss = given.gradient, given.loss
        elif self._taken is not None:
            self.counts.gradients += client.num_samples
            if update.gradient is None:
                update.gradient = self._taken
                update.loss = self._at_end(given.full_gradient, client, self._taken, start)
        if given.wants_losses or given.own_losses is not None:
            own = given.own_losses
            update.loss = given.loss if own is None else self._own_loss(client, own, start)
            if self.divergence.found(client, update.loss):
                return False
        if self.at in (None, "start") or update.gradient is None or not self._sums:
            return True
        return not self.divergence.found(client, update.gradient)

    def _at_end(self, gradient: FullGradient, client: Client, out: Tensor | None, start: Tensor) -> Tensor:
        """Computes a gradient where the client ended, without a displacement of its start; returns the loss."""
        state, weights = self.state, self.state.vector.data
        if state.origin is start:
            return gradient.compute(client, out)
        end, displaced = weights.clone(), (state.origin != start).any()  # one of 0 must leave no rounding
        weights.copy_(torch.where(displaced, end - state.origin + start, end))
        loss = gradient.compute(client, out)
        weights.copy_(end)
        return loss

    def _own_loss(self, client: Client, losses: FullGradient, start: Tensor) -> Tensor:
        """Computes f_i by a pass of its own, at w or where the client ended; the module stays the trained one."""
        state = self.state
        self.counts.gradients += losses.count(client)
        if self.aggregator.losses_at == "end":
            return self._at_end(losses, client, None, start)
        weights, buffers = state.vector.all_data.clone(), state.buffers.live.copy()
        loss = losses.compute_at_start((client,), None)[0]
        state.vector.all_data.copy_(weights)
        state.buffers.live.load(buffers)
        return loss


def _held_out(state: TrainState, hooks: HookCaller) -> BatchSource:
    """Returns the batches of what the data hold out of each client; refuses data where one that trains has none."""
    data, rule = hooks.trainer.datamodule, type(hooks.trainer.aggregator).__name__
    if not hasattr(data, "held_out_source"):
        raise FederatedError(
            f"Expected a FederatedDataModule for {rule}, which reads losses over held-out samples, got "
            f"{type(data).__name__}: wrap it as `source`, or set `--aggregator.losses_over train`."
        )
    source: BatchSource = data.held_out_source("val").to(state.vector.device)
    state.held_out.append(source)
    lacking = np.flatnonzero((np.asarray(state.source.sizes) > 0) & (np.asarray(source.sizes) == 0))
    if len(lacking):
        raise FederatedError(
            f"Expected held-out samples of every client for {rule}, got none of client {lacking[0]} and "
            f"{len(lacking) - 1} others: raise `--data.val_fraction`, or set `--aggregator.losses_over train`."
        )
    return source


def _gradients_over(hooks: HookCaller) -> Literal["data", "batch"]:
    """Returns over which samples gradients at w are taken; refuses parts that want different samples."""
    by_batch = [part for part in hooks.callbacks if isinstance(part, ClientAlgorithm) and part.over == "batch"]
    others = [part for part in hooks.callbacks if part not in by_batch and asks_for_full_gradients(part)]
    if by_batch and others:
        raise FederatedError(
            "Expected all gradients at the global model to be over the same samples, got "
            f"{type(others[0]).__name__}, which takes them over all of a client's data, beside `--client.over batch`: "
            "leave one of them out."
        )
    return "batch" if by_batch else "data"
