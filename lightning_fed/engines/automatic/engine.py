"""Trains many clients at once where nobody asked for it: what cannot be done so is done one after another."""

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

from lightning_fed.core.seeding import Purpose, seed_everywhere, seed_for
from lightning_fed.core.updates import Client, Update
from lightning_fed.engines.sequential import SequentialEngine
from lightning_fed.engines.trial import holds_stacked_tensors, next_numbers
from lightning_fed.engines.vectorized import VectorizedEngine
from lightning_fed.engines.vectorized.batches import LaneBatches
from lightning_fed.engines.vectorized.log import LaneLog
from lightning_fed.engines.vectorized.step import CannotStack, cause_of

__all__ = ["AutomaticEngine"]

_log = logging.getLogger("lightning.pytorch")  # of every process: each falls back for itself


class AutomaticEngine(VectorizedEngine):
    """Trains chunk after chunk at once, until one fails: that one and all later clients train one after another.

    Nothing of a chunk is part of the round before all its steps are taken, so that it can be trained again.

    Args:
        *args: See ``Engine``.
        **kwargs: See ``VectorizedEngine``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.make_alone = partial(SequentialEngine, *args)
        self.alone: SequentialEngine | None = None

    def updates(self, clients: tuple[Client, ...]) -> Iterator[Update]:
        """Trains chunk after chunk; see ``Engine.updates``."""
        for first in range(0, len(clients), self.chunk_size):
            chunk = clients[first : first + self.chunk_size]
            trained = None if self.alone is not None else self._try_chunk(chunk)
            yield from self._one_by_one(chunk) if trained is None else trained

    def _try_chunk(self, clients: tuple[Client, ...]) -> Iterator[Update] | None:
        """Lets clients train at once; None if that failed, whatever it was."""
        logged = self.recorder.series
        try:
            return self._train_chunk(clients)
        except Exception as error:
            self.recorder.series = logged
            self._fall_back(error)
            return None

    def _run_steps(self, batches: LaneBatches, log: LaneLog) -> list[tuple[float, float]]:
        options = super()._run_steps(batches, log)
        first = min(batches.clients, key=lambda client: client.id)
        seed, device = seed_for(self.state.seed, Purpose.LOCAL, first.round, first.id), self.state.vector.device
        numbers = next_numbers(device)
        seed_everywhere(seed)
        unused = next_numbers(device)
        seed_everywhere(seed)
        if numbers != unused:
            raise CannotStack("its training draws random numbers, which would be others for many clients at once")
        if name := holds_stacked_tensors(self.module):
            raise CannotStack(f"{type(self.module).__name__} keeps tensors in its attribute `{name}` during training")
        return options

    def _fall_back(self, error: Exception) -> None:
        """Says why, and makes everything what it was before the chunk."""
        state, reason, start = self.state, cause_of(error), self.start_gradients
        _log.info(f"Engine: sequential from round {state.round} on, as {reason}.")
        state.engine_choice = {"engine": "sequential", "reason": reason}
        state.leave_client()
        state.vector.refresh()
        self.alone = self.make_alone()
        state.start_gradients = self.alone.start_gradients = start  # of this round, which has begun
        start.full_gradient = self.full_gradient
        self.alone.divergence, self.at_work = self.divergence, ()
        del self.lanes, self.kept_gradients  # their matrices are of no more use

    def _one_by_one(self, clients: tuple[Client, ...]) -> Iterator[Update]:
        """Lets the engine of single clients train them, as a part of this one's round."""
        assert self.alone is not None
        alone, alone.start = self.alone, self.start
        alone.samples = alone.end_samples = 0
        yield from alone.updates(clients)
        self.samples += alone.samples
        self.end_samples += alone.end_samples
