"""Trains many clients at once where nobody asked for it: what cannot be done so is done one after another."""

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_fed.core.seeding import Purpose, generator_for
from lightning_fed.core.updates import Client, Update
from lightning_fed.engines.full_gradient import FullGradient
from lightning_fed.engines.sequential import SequentialEngine
from lightning_fed.engines.trial import holds_stacked_tensors
from lightning_fed.engines.vectorized import VectorizedEngine
from lightning_fed.engines.vectorized.batches import LaneBatches
from lightning_fed.engines.vectorized.full_gradient import StackedFullGradient
from lightning_fed.engines.vectorized.log import LaneLog
from lightning_fed.engines.vectorized.step import CannotStack, first_sentence

__all__ = ["AutomaticEngine"]

_log = logging.getLogger("lightning.pytorch")  # of every process: each falls back for itself


class AutomaticGradient(StackedFullGradient):
    """Computes gradients of many clients at once until that fails, and then one after another."""

    falls_back = False

    def compute_at_start(self, clients: tuple[Client, ...], out: Tensor) -> Tensor:
        """Computes the gradients of clients at the global model; see ``FullGradient``."""
        if not self.falls_back:
            try:
                return super().compute_at_start(clients, out)
            except Exception as error:
                self.fall_back(error)
        return FullGradient.compute_at_start(self, clients, out)

    def fall_back(self, error: Exception) -> None:
        """Says why."""
        at, self.falls_back, self.state.client = self.state.round, True, None
        how = f"one client after another from round {at} on"
        _log.info(f"Gradients over a client's full data: {how}, as {_why(error)}.")


class AutomaticEngine(VectorizedEngine, SequentialEngine):  # type: ignore[misc]  # of two steps one is there at a time
    """Trains chunk after chunk at once, until one fails: that one and all later clients train one after another.

    Nothing of a chunk is part of the round before all its steps are taken, so that it can be trained again.
    """

    gradient_kind = AutomaticGradient
    falls_back = False

    def set_up(self) -> None:
        """Waits with the step of one client until it is needed."""

    def updates(self, clients: tuple[Client, ...]) -> Iterator[Update]:
        """Trains chunk after chunk; see ``Engine.updates``."""
        for first in range(0, len(clients), self.chunk_size):
            chunk = clients[first : first + self.chunk_size]
            trained = None if self.falls_back else self._try_chunk(chunk)
            yield from SequentialEngine.updates(self, chunk) if trained is None else trained

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
        unused = generator_for(self.state.seed, Purpose.LOCAL, first.round, first.id)
        if not torch.equal(unused.get_state(), torch.default_generator.get_state()):
            raise CannotStack("its training draws random numbers, which would be others for many clients at once")
        if name := holds_stacked_tensors(self.module):
            raise CannotStack(f"{type(self.module).__name__} keeps tensors in its attribute `{name}` during training")
        return options

    def _take_end_gradients(self, clients: tuple[Client, ...], lanes: list[int]) -> None:
        try:
            super()._take_end_gradients(clients, lanes)
        except Exception as error:
            assert isinstance(self.stacked_gradient, AutomaticGradient)
            self.stacked_gradient.fall_back(error)
            self.stacked_gradient, self.ended = None, {}

    def _fall_back(self, error: Exception) -> None:
        """Says why, and makes everything what it was before the chunk."""
        state, reason = self.state, _why(error)
        _log.info(f"Engine: sequential from round {state.round} on, as {reason}.")
        state.engine_choice = {"engine": "sequential", "reason": reason}
        state.client, state.local_step, state.displacement = None, 0, None
        state.vector.refresh()
        self.falls_back, self.stacked_gradient, self.ended = True, None, {}
        self.start_gradients.full_gradient = self.full_gradient
        del self.lanes, self.kept_gradients  # their matrices are of no more use
        SequentialEngine.set_up(self)


def _why(error: Exception) -> str:
    """Says what failed, in a part of a sentence."""
    if isinstance(error, CannotStack):
        return str(error)
    if isinstance(error.__cause__, CannotStack):  # of which a sentence was made
        return str(error.__cause__)
    return f"the step does not go through torch.func.vmap each time ({first_sentence(error)})"
