"""Who arrives in a round if clients train all the time, as a pure function of the seed."""

from collections.abc import Iterator
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count, islice
from typing import Any, TypeAlias

import numpy as np

from lightning_fed.core.seeding import Purpose, numpy_generator_for
from lightning_fed.errors import FederatedError, expect, expect_count, expect_number
from lightning_fed.sampling.samplers import ClientSampler

__all__ = ["Arrivals"]

# Who arrives, each with the version of its model (steps of the server); the versions of who trains on; seconds.
_Step: TypeAlias = tuple[dict[int, int], set[int], float]


class Arrivals(ClientSampler):
    """Draws those that arrive first of ``at_once`` clients that train all the time; for the client algorithm ``Stale``.

    Who arrives is replaced at once by an idle client, drawn uniformly, which gets the newest model. After
    ``clients_per_round`` arrivals, the buffer, the server steps, and they are idle again. A training takes a client
    exp(``spread`` z_i) simulated seconds, with the z_i of ``Stragglers``, whatever its samples.

    Args:
        at_once: Clients that train at the same time.
        spread: Standard deviation over clients of the logarithm of their time, whose median is a second.
    """

    made_for = "Stale"

    def __init__(self, at_once: int = 10, spread: float = 0.5) -> None:
        self.at_once = expect_count("--trainer.participation.sampler.at_once", at_once)
        self.spread = expect_number("--trainer.participation.sampler.spread", spread, least=0, most=10)

    def arrived(self, round: int, count: int, sizes: np.ndarray, seed: int) -> _Step:
        """Returns {client: version of the model that it got}, versions of who trains on, and seconds, of a round."""
        times = np.exp(self.spread * numpy_generator_for(seed, Purpose.SPEED).standard_normal(len(sizes)))
        clients = tuple((int(client), float(times[client])) for client in np.flatnonzero(sizes))
        option, most = "--trainer.participation.sampler.at_once", len(clients)
        expect(self.at_once <= most, f"Expected `{option}` to be at most the {most} clients, got {self.at_once}.")
        steps, more = _replay(self.at_once, min(count, most), clients, seed)
        steps.extend(islice(more, max(0, round - len(steps))))
        return steps[round - 1]

    def sample(self, round: int, count: int, sizes: np.ndarray, seed: int) -> np.ndarray:
        return np.array(list(self.arrived(round, count, sizes, seed)[0]))

    def sample_available(self, *args: object) -> np.ndarray:
        """Refuses clients that come and go: they would leave in the middle of their training."""
        raise FederatedError("Expected no `--trainer.participation.availability` with Arrivals, got one: leave it out.")

    def seconds(self, round: int, count: int, sizes: np.ndarray, seed: int) -> float:
        return self.arrived(round, count, sizes, seed)[2]


@lru_cache(maxsize=4)
def _replay(*plan: Any) -> tuple[list[_Step], Iterator[_Step]]:
    """Returns the rounds so far, and what gives the next ones: a run asks for one after the other."""
    return [], _rounds(*plan)


def _rounds(at_once: int, size: int, clients: tuple[tuple[int, float], ...], seed: int) -> Iterator[_Step]:
    times, idle, now = dict(clients), [client for client, _ in clients], 0.0
    stream, training = numpy_generator_for(seed, Purpose.SAMPLE), list[tuple[float, int, int]]()
    for version in count():
        began, arrived = now, dict[int, int]()
        while len(arrived) < size:
            while idle and len(training) < at_once:
                client = idle.pop(int(stream.integers(len(idle))))
                heappush(training, (now + times[client], client, version))
            now, client, arrived[client] = heappop(training)
        idle += arrived
        yield arrived, {behind for _, _, behind in training}, now - began
