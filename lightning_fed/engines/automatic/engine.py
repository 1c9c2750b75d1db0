"""The engine that ``auto`` chooses for many clients at once; it trains one after another if that fails."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from lightning_fed.core.display.shown import is_news
from lightning_fed.core.seeding import Purpose, seed_everywhere, seed_for
from lightning_fed.core.updates import Client, Update
from lightning_fed.core.user_code import own_places
from lightning_fed.engines.attributes import Attributes
from lightning_fed.engines.sequential import SequentialEngine
from lightning_fed.engines.trial import random_states
from lightning_fed.engines.vectorized import VectorizedEngine
from lightning_fed.engines.vectorized.batches import LaneBatches
from lightning_fed.engines.vectorized.log import LaneLog
from lightning_fed.engines.vectorized.refusals import CannotStack, attempt, tell

__all__ = ["AutomaticEngine"]


class AutomaticEngine(VectorizedEngine):
    """Trains clients in chunks, each chunk at once; if one fails, it and all later clients train one after another.

    A chunk enters the round only after all its steps are taken, so that it can be trained again if it fails.

    Args:
        *args: See ``Engine``.
        **kwargs: See ``VectorizedEngine``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.make_alone = partial(SequentialEngine, *args)
        self.alone: SequentialEngine | None = None
        self.places = own_places(self.module)

    def updates(self, clients: tuple[Client, ...]) -> Iterator[Update]:
        """Trains chunk after chunk; see ``Engine.updates``."""
        while clients and self.alone is None:
            chunk = clients[: self.chunk_size]
            if (trained := self._try_chunk(chunk)) is not None:
                yield from trained
                clients = clients[len(chunk) :]
        if self.alone is not None:
            yield from self._one_by_one(self.alone, clients)

    def _try_chunk(self, clients: tuple[Client, ...]) -> Iterator[Update] | None:
        """Trains clients at once; None if that failed for any reason: the next try is with fewer, or one at a time."""
        state, logged = self.state, self.recorder.series
        counted = self.start_gradients.samples, self.more_samples
        trained, reason, fewer = attempt(lambda: self._train_chunk(clients), lambda: len(clients))
        if trained is None:
            self.recorder.series, (self.start_gradients.samples, self.more_samples) = logged, counted
            state.leave_client()
            state.vector.refresh()
            if fewer:
                self._shrink(fewer, reason)
            else:
                self._fall_back(reason)
        return trained

    def _run_steps(self, batches: LaneBatches, log: LaneLog) -> list[tuple[float, float]]:
        before = Attributes(self.module, self.places)
        try:
            options = super()._run_steps(batches, log)
            self._expect_the_same(batches, before)
        except Exception:  # any error is raised again: these clients then train again from the same attributes
            before.put_back()
            raise
        return options

    def _expect_the_same(self, batches: LaneBatches, before: Attributes) -> None:
        """Refuses steps that drew random numbers or changed what clients share, even if the trial step did not."""
        first = min(batches.clients, key=lambda client: client.id)
        seed, device = seed_for(self.state.seed, Purpose.LOCAL, first.round, first.id), self.state.vector.device
        drawn = random_states(device)
        seed_everywhere(seed)
        if random_states(device) != drawn:
            raise CannotStack("its training draws random numbers, which would differ for many clients at once")
        if name := before.shared():
            where = type(self.module).__name__
            raise CannotStack(f"{where} changes `{name}` in training, which clients trained at once would share")

    def _shrink(self, size: int, reason: str) -> None:
        """Lets fewer clients train at once, in a resumed run too."""
        is_news("engine", f"chunks of {size}")  # so that the next run prints its own line
        tell(f"Engine: vectorized in chunks of {size} from round {self.state.round} on, as {reason}.")
        self.chunk_size = size
        self.state.engine_choice = {**(self.state.engine_choice or {}), "chunk_size": size}
        self._make_room(0)

    def _fall_back(self, reason: str) -> None:
        """Prints why, and trains clients one after another from here on."""
        state, start = self.state, self.start_gradients
        is_news("engine", f"sequential from round {state.round} on")
        tell(f"Engine: sequential from round {state.round} on, as {reason}.")
        state.engine_choice = {"engine": "sequential", "reason": reason}
        self.alone = self.make_alone()
        state.client_states.elsewhere = self.assignment.elsewhere  # it still knows who holds which client's records
        state.start_gradients = self.alone.start_gradients = start  # of this round, which has begun
        start.full_gradient = self.full_gradient
        self.alone.divergence, self.at_work = self.divergence, ()
        self._make_room(0)  # frees the matrices

    def _one_by_one(self, alone: SequentialEngine, clients: tuple[Client, ...]) -> Iterator[Update]:
        """Trains clients with the sequential engine, as part of this engine's round."""
        alone.start, alone.samples, alone.more_samples = self.start, 0, 0
        yield from alone.updates(clients)
        self.samples += alone.samples
        self.more_samples += alone.more_samples
