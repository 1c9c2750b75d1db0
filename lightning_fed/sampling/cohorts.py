"""The cohort of a round, and its options: who is available, drawn and waited for, and how much each works."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from lightning.pytorch.utilities import rank_zero_warn

from lightning_fed.core.updates import Client, Cohort
from lightning_fed.errors import FederatedError
from lightning_fed.sampling.availability import Availability
from lightning_fed.sampling.samplers import ClientSampler, expect_ids
from lightning_fed.sampling.work import ClientWork, Stragglers

__all__ = ["CohortDraw", "Participation"]

_EXAMPLES: dict[str, tuple[type[Any], str]] = {
    "sampler": (ClientSampler, "a ClientSampler, such as UniformSampler"),
    "availability": (Availability, "an Availability, such as BernoulliAvailability"),
    "stragglers": (Stragglers, "Stragglers"),
    "work": (ClientWork, "a ClientWork, such as UnequalWork"),
}


@dataclass(frozen=True)
class Participation:
    """Who takes part in a round, and how much work each client does.

    Args:
        sampler: Draws the cohort of a round; uniformly by default.
        availability: Says which clients can be drawn in a round; all by default.
        stragglers: Gives clients a speed and rounds a deadline, in simulated time; neither by default.
        work: Gives clients their own numbers of local steps, and learning rates; the same for all by default.
    """

    sampler: ClientSampler | None = None
    availability: Availability | None = None
    stragglers: Stragglers | None = None
    work: ClientWork | None = None

    def __post_init__(self) -> None:
        """Refuses parts of another type."""
        for name, (kind, example) in _EXAMPLES.items():
            part = getattr(self, name)
            if part is not None and not isinstance(part, kind):
                raise FederatedError(f"Expected `--trainer.participation.{name}` to be {example}, got {part!r}.")


@dataclass
class CohortDraw:
    """Draws cohorts with the parts of ``Participation``; each depends only on the seed and the round.

    Attributes:
        seed: The run's seed.
        sizes: Training samples of every client, shape (N,).
        steps: Local steps of each by the trainer's options, shape (N,).
        steps_per_epoch: The same for one local epoch.
        fewest: Fewest clients that the server's step needs; if there are fewer, nobody trains.
        facts: Metrics that the last draw adds to the row of its round.
        seconds: Simulated time of its round, None where nothing has a clock.
    """

    seed: int
    sizes: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]
    steps_per_epoch: npt.NDArray[np.int64]
    fewest: int
    sampler: ClientSampler
    availability: Availability | None = None
    stragglers: Stragglers | None = None
    work: ClientWork | None = None
    facts: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    _warned: bool = False

    def draw(self, round: int, count: int) -> Cohort:
        """Draws the cohort of a round for which ``count`` clients are wanted."""
        self.facts, self.seconds = {}, self.sampler.seconds(round, count, self.sizes, self.seed)
        more = count if self.stragglers is None else min(self.stragglers.selected(count), len(self.sizes))
        drawn = np.sort(self._sample(round, more))
        clients = self._with_work(round, drawn[self.sizes[drawn] > 0])
        if self.stragglers is not None:
            clients = self._wait(self.stragglers, clients, count if more > count else len(clients))
        if not self.suffices(round, len(clients)):
            clients = []
        train = {client.id for client in clients}
        return Cohort(round, tuple(clients), tuple(id for id in drawn.tolist() if id not in train))

    def expect_anybody(self, max_rounds: int) -> None:
        """Refuses an availability by which no client with samples can be drawn in any round."""
        rounds, sizes = range(1, max_rounds + 1), self.sizes
        if self.availability is None or not rounds or any((self._available(at) & (sizes > 0)).any() for at in rounds):
            return
        raise FederatedError(
            f"Expected `--trainer.participation.availability` {type(self.availability).__name__} to make a client with "
            f"samples available in any of the {max_rounds} rounds, got none: nobody would train."
        )

    def _sample(self, round: int, count: int) -> npt.NDArray[np.int64]:
        sampler, sizes = self.sampler, self.sizes
        if self.availability is None:
            return expect_ids(sampler, sampler.sample(round, count, sizes, self.seed), len(sizes))
        available = self._available(round)
        self.facts["clients/available"] = float(np.count_nonzero(available))
        if not available.any():
            return np.empty(0, dtype=np.int64)
        drawn = sampler.sample_available(round, count, sizes, available, self.seed)
        return expect_ids(sampler, drawn, len(sizes))

    def _available(self, round: int) -> npt.NDArray[np.bool_]:
        rule, count = self.availability, len(self.sizes)
        assert rule is not None
        available = np.asarray(rule.available(round, count, self.seed))
        if available.shape != self.sizes.shape or available.dtype != np.bool_:
            raise FederatedError(
                f"Expected `--trainer.participation.availability` {type(rule).__name__} to return true or false for "
                f"each of {count} clients, got an array of {available.dtype} of shape {available.shape}."
            )
        return available

    def _with_work(self, round: int, ids: npt.NDArray[np.int64]) -> list[Client]:
        """Returns clients with their learning-rate factors, and their steps if these differ from the trainer's."""
        pairs = list(zip(ids.tolist(), self.sizes[ids].tolist(), strict=True))
        if self.work is None:
            return [Client(id, size, round) for id, size in pairs]
        steps, factors = map(np.asarray, self.work.assign(round, self.steps, self.steps_per_epoch, self.seed))
        integers = steps.shape == factors.shape == self.sizes.shape and steps.dtype.kind in "iu"
        if not integers or (steps[ids] < 1).any() or not ((factors[ids] > 0) & np.isfinite(factors[ids])).all():
            raise FederatedError(
                f"Expected `--trainer.participation.work` {type(self.work).__name__} to give each of {len(self.sizes)} "
                "clients an integer number of local steps of at least 1, and a finite factor above 0 on the learning "
                f"rate, got {steps.ravel()[:5].tolist()} and {factors.ravel()[:5].tolist()}."
            )
        own = np.where(steps == self.steps, 0, steps)
        return [Client(id, size, round, int(own[id]) or None, float(factors[id])) for id, size in pairs]

    def _wait(self, stragglers: Stragglers, clients: list[Client], wanted: int) -> list[Client]:
        """Returns the clients that the server waits for, with the steps that they finish in time."""
        ids = np.array([client.id for client in clients], dtype=np.int64)
        steps = np.array([client.steps or self.steps[client.id] for client in clients], dtype=np.int64)
        arrivals = stragglers.arrive(steps, stragglers.step_times(len(self.sizes), self.seed)[ids], wanted)
        self.facts["clients/late"], self.seconds = float(arrivals.late), arrivals.seconds
        return [
            clients[at] if taken == steps[at] else replace(clients[at], steps=int(taken))
            for at, taken in zip(arrivals.kept, arrivals.steps, strict=True)
        ]

    def suffices(self, round: int, count: int) -> bool:
        """Says whether the server can step with ``count`` clients; warns in the first round in which it cannot."""
        if count < self.fewest and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"Round {round} leaves the model as it is: {count} clients take part, but it needs at least "
                f"{self.fewest}; the column `clients/trained` shows in which other rounds this happens."
            )
        return count >= self.fewest
