"""The gradients of a round's clients at the global model, before any of them trains."""

import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_fed.aggregators.base import Aggregator
from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.core.hooks import FederatedCallback, HookCaller
from lightning_fed.core.reduction import LongSum
from lightning_fed.core.train_state import TrainState
from lightning_fed.core.updates import Client, Cohort, Need, StartGradient
from lightning_fed.distributed.reducer import gather_rows
from lightning_fed.distributed.strategy import processes_of
from lightning_fed.engines.full_gradient import FullGradient

__all__ = ["ComputedStartGradients", "asks_for_full_gradients"]

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
        samples: Samples whose gradient, or loss alone, was computed in this round for an algorithm.
        wants_losses: Whether the aggregator asks for f_i(w) over training samples.
        losses_alone: Whether f_i(w) needs its own pass in this round, because no part asks for gradients at w.
        own_losses: Computes f_i for the aggregator where that is not f_i(w) over training samples, else None.
    """

    def __init__(
        self, state: TrainState, aggregator: Aggregator, hooks: HookCaller, full_gradient: FullGradient
    ) -> None:
        self.state, self.aggregator, self.hooks, self.full_gradient = state, aggregator, hooks, full_gradient
        self.processes = processes_of(state.fabric)
        self.level: StartGradient = "none"
        self.method_level: StartGradient = "none"
        self.exchanged, self.samples = False, 0
        self.wants_losses, self.losses_alone = aggregator.reads_start_losses, False
        self.own_losses: FullGradient | None = None
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
        self.samples = 0
        if self.wants_losses and self.method_level == "none":
            self.samples = sum(map(self.full_gradient.count, own))
        self.clients = ()
        if self.level == "client" and not len(self._own):
            self._own = torch.empty_like(self.state.weights)
        if self.level != "cohort" or not cohort.clients:
            return None
        if len(self._all_rows) < len(own):
            self._all_rows = self._all_rows.new_empty(len(own), self._all_rows.shape[1])
        rows = self._all_rows[: len(own)]
        with self.processes.working_alone():
            losses = self.compute(own, rows)
        self._arrange(own, cohort.clients, rows, losses)
        if not self.exchanged:
            return None
        sizes: Tensor = torch.linalg.vector_norm(rows, dim=1)
        return sizes + losses

    def compute(self, clients: tuple[Client, ...], out: Tensor) -> Tensor:
        """Computes the gradients at w of some clients, shape (n, d); returns their losses there, shape (n,)."""
        self._count(clients)
        return self.full_gradient.compute_at_start(clients, out)

    def losses_now(self, clients: tuple[Client, ...]) -> Tensor:
        """Computes f_i of clients of the round at the global model as it is now, shape (n,); see ``StartGradients``."""
        computes = self.own_losses or self.full_gradient
        self.samples += sum(map(computes.count, clients))
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
            self.samples += sum(map(self.full_gradient.count, clients))

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

    def load(self, client: Client) -> None:
        """Makes ``gradient`` and ``loss`` those of the client about to train; the live model holds w."""
        if self.level == "cohort":
            at = self._at[client.id]
            self.gradient, self.loss = self._rows[at], self._losses[at]
        elif self.level == "client":
            self._count((client,))
            self.loss = self.full_gradient.compute(client, self._own)
            self.gradient = self._own
        elif self.losses_alone:
            self.loss = self.full_gradient.compute(client, None)
