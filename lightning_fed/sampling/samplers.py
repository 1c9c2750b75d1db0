"""Client samplers, as pure functions of (seed, round): who is drawn, or who arrives if all train all the time."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count, islice
from typing import Any, TypeAlias

import numpy as np

from lightning_fed.core.seeding import Purpose, numpy_generator_for
from lightning_fed.errors import FederatedError, expect, expect_count, expect_number, expect_one_each

__all__ = [
    "Arrivals", "ClientSampler", "PoissonSampler", "UniformSampler", "WeightedSampler", "cohort_size", "expect_ids",
]  # fmt: skip

# Who arrives, each with the version of its model (steps of the server); the versions of who trains on; seconds.
_Step: TypeAlias = tuple[dict[int, int], set[int], float]


class ClientSampler(ABC):
    """Draws the clients of a round; subclass it for a rule of your own.

    Attributes:
        made_for: The client algorithm without which its draws mean nothing; None if there is none.
    """

    made_for: str | None = None

    @abstractmethod
    def sample(self, round: int, count: int, sizes: np.ndarray, seed: int) -> np.ndarray:
        """Draws a cohort.

        Args:
            round: Round index, from 1.
            count: Clients to draw, at most N.
            sizes: Training samples of every client, integers of shape (N,).
            seed: The run's seed. The result must depend only on the arguments.

        Returns:
            Distinct client ids, integers, in any order: ``count`` of them, or another number if your rule wants that.
        """

    def sample_available(
        self, round: int, count: int, sizes: np.ndarray, available: np.ndarray, seed: int
    ) -> np.ndarray:
        """Draws a cohort from the available clients, of which there is at least one.

        By default it calls ``sample`` with the sizes of these clients only, numbered from 0; override it if your rule
        needs the clients' ids. ``available`` is a bool for each client, shape (N,). All are drawn if there are fewer
        than ``count``. The other arguments and the result are as in ``sample``.
        """
        ids: np.ndarray = np.flatnonzero(available)
        places = expect_ids(self, self.sample(round, min(count, len(ids)), sizes[ids], seed), len(ids))
        return ids.take(places)

    def seconds(self, round: int, count: int, sizes: np.ndarray, seed: int) -> float | None:
        """Returns the simulated time that a round takes; None for a rule without a clock."""
        return None


class UniformSampler(ClientSampler):
    """Draws uniformly without replacement (McMahan et al., AISTATS 2017, Algorithm 1)."""

    def sample(self, round: int, count: int, sizes: np.ndarray, seed: int) -> np.ndarray:
        rng = numpy_generator_for(seed, Purpose.SAMPLE, round)
        return rng.choice(len(sizes), size=count, replace=False, shuffle=False)


class PoissonSampler(ClientSampler):
    """Lets each client take part by itself with probability q = n / N, so that n take part on average, possibly none.

    What ``CentralDP`` assumes: who takes part says nothing about who else does.
    """

    def sample(self, round: int, count: int, sizes: np.ndarray, seed: int) -> np.ndarray:
        return np.flatnonzero(numpy_generator_for(seed, Purpose.SAMPLE, round).random(len(sizes)) < count / len(sizes))


class WeightedSampler(ClientSampler):
    """Draws without replacement, each draw with probability proportional to a client's weight.

    Args:
        weights: Weights of the N clients, at least 0; the clients' sample counts when None.
    """

    def __init__(self, weights: list[float] | None = None) -> None:
        if weights is not None and not all(0 <= weight < float("inf") for weight in weights):
            raise FederatedError(
                "Expected every value of `--trainer.participation.sampler.weights` to be finite and at least 0."
            )
        self.weights = weights

    def sample(self, round: int, count: int, sizes: np.ndarray, seed: int) -> np.ndarray:
        """Draws ``count`` clients; those of weight 0 are never drawn."""
        weights = self._weights_of(sizes)
        if np.count_nonzero(weights) < count:
            raise FederatedError(
                f"Expected at least {count} clients with a positive weight to draw from, got "
                f"{np.count_nonzero(weights)}: lower `--trainer.clients_per_round`."
            )
        return self._draw(round, count, weights, seed)

    def sample_available(
        self, round: int, count: int, sizes: np.ndarray, available: np.ndarray, seed: int
    ) -> np.ndarray:
        """Draws among the available clients whose weight is not 0; all of them if there are fewer than ``count``."""
        weights = np.where(available, self._weights_of(sizes), 0.0)
        return self._draw(round, min(count, int(np.count_nonzero(weights))), weights, seed)

    def _draw(self, round: int, count: int, weights: np.ndarray, seed: int) -> np.ndarray:
        if count == 0:
            return np.empty(0, dtype=np.int64)
        rng = numpy_generator_for(seed, Purpose.SAMPLE, round)
        return rng.choice(len(weights), size=count, replace=False, p=weights / weights.sum(), shuffle=False)

    def _weights_of(self, sizes: np.ndarray) -> np.ndarray:
        weights = np.asarray(sizes if self.weights is None else self.weights, dtype=np.float64)
        expect_one_each("--trainer.participation.sampler.weights", weights.tolist(), len(sizes))
        return weights


def cohort_size(clients_per_round: int | float, num_clients: int) -> int:
    """Turns a count (int) or a fraction C in (0, 1] (float) of N registered clients into a number of clients.

    For a fraction it is max(round(C N), 1) (McMahan et al., AISTATS 2017, Algorithm 1).
    """
    if isinstance(clients_per_round, float):
        return max(round(clients_per_round * num_clients), 1)
    if clients_per_round > num_clients:
        raise FederatedError(
            f"Expected `--trainer.clients_per_round` to be at most the number of clients ({num_clients}), "
            f"got {clients_per_round}: lower it or raise `--data.num_clients`."
        )
    return clients_per_round


def expect_ids(sampler: ClientSampler, drawn: Any, num_clients: int) -> np.ndarray:
    """Returns the ids that a sampler has drawn, shape (n,); refuses all but distinct ids of the clients."""
    ids = np.asarray(drawn)
    of_ids = ids.ndim == 1 and (ids.dtype.kind in "iu" or not len(ids))
    if not of_ids or len(np.unique(ids)) != len(ids) or ids.min(initial=0) < 0 or ids.max(initial=0) >= num_clients:
        raise FederatedError(
            f"Expected `--trainer.participation.sampler` {type(sampler).__name__} to draw distinct client ids "
            f"in [0, {num_clients}), got {ids.ravel()[:10].tolist()}."
        )
    return ids.astype(np.int64)


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
