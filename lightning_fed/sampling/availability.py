"""Which clients can be reached in a round, as a pure function of (seed, round)."""

import csv
from abc import ABC, abstractmethod
from io import TextIOWrapper

import numpy as np
import numpy.typing as npt

from lightning_fed.core.files import open_regular
from lightning_fed.core.seeding import Purpose, numpy_generator_for
from lightning_fed.errors import FederatedError, expect_count, expect_number, expect_one_each, is_number

__all__ = ["Availability", "BernoulliAvailability", "PeriodicAvailability", "TraceAvailability"]


class Availability(ABC):
    """Says which clients can be drawn; subclass it and name your class under ``trainer.participation.availability``."""

    @abstractmethod
    def available(self, round: int, num_clients: int, seed: int) -> npt.NDArray[np.bool_]:
        """Says which clients can be reached.

        Args:
            round: Round index, from 1.
            num_clients: N.
            seed: The run's seed. The result must depend only on the arguments.

        Returns:
            True for each client that can be drawn, shape (N,).
        """


class BernoulliAvailability(Availability):
    """Each client is available with probability ``p``, drawn anew in each round and independently of the others.

    Args:
        p: The probability, in [0, 1]; a list has one for each client.
    """

    def __init__(self, p: float | list[float] = 0.9) -> None:
        if not all(is_number(each, least=0, most=1) for each in (p if isinstance(p, list) else [p])):
            raise FederatedError(
                "Expected `--trainer.participation.availability.p` to be a probability in [0, 1], or a list of them, "
                f"got {p!r}."
            )
        self.p = p

    def available(self, round: int, num_clients: int, seed: int) -> npt.NDArray[np.bool_]:
        """Draws for every client, so that the result does not depend on the cohort."""
        if isinstance(self.p, list):
            expect_one_each("--trainer.participation.availability.p", self.p, num_clients)
        draws = numpy_generator_for(seed, Purpose.AVAILABLE, round).random(num_clients)
        there: npt.NDArray[np.bool_] = draws < np.asarray(self.p)
        return there


class PeriodicAvailability(Availability):
    """Each client is available for the same part of every period, such as the nights of its time zone.

    Args:
        period: Rounds in a period.
        share: Part of the period in which a client is available, above 0 and at most 1.
        spread: Part of the period over which the clients' phases are spread: with 1 about as many are available in
            every round, with 0 all come and go together.
    """

    def __init__(self, period: int, share: float = 0.5, spread: float = 1.0) -> None:
        self.period = expect_count("--trainer.participation.availability.period", period)
        self.share = expect_number("--trainer.participation.availability.share", share, above=0, most=1)
        self.spread = expect_number("--trainer.participation.availability.spread", spread, least=0, most=1)

    def available(self, round: int, num_clients: int, seed: int) -> npt.NDArray[np.bool_]:
        """Finds where in its period each client is; phases are drawn once, from the seed."""
        phases = numpy_generator_for(seed, Purpose.AVAILABLE).random(num_clients) * self.spread * self.period
        there: npt.NDArray[np.bool_] = (round - 1 + phases) % self.period < self.share * self.period
        return there


class TraceAvailability(Availability):
    """Each client is available in the rounds that a file lists, and in no others.

    Args:
        path: A CSV file with the columns ``client``, ``from_round`` and ``to_round``, the latter included; a client may
            have any number of rows.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._rows = _read_trace(path)

    def available(self, round: int, num_clients: int, seed: int) -> npt.NDArray[np.bool_]:
        clients, first, last = self._rows
        if clients.max() >= num_clients:
            raise FederatedError(
                f"Expected the clients of {self.path}, given as `--trainer.participation.availability.path`, to be in "
                f"[0, {num_clients}), got {clients.max()}."
            )
        there = np.zeros(num_clients, dtype=np.bool_)
        there[clients[(first <= round) & (round <= last)]] = True
        return there


def _read_trace(path: str) -> tuple[npt.NDArray[np.int64], ...]:
    """Returns the columns of a trace."""
    names, rows = ("client", "from_round", "to_round"), []
    wrong = f"Expected {path}, given as `--trainer.participation.availability.path`, to be a CSV file with the columns"
    try:
        with TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="") as file:
            for line, row in enumerate(csv.DictReader(file), start=2):
                rows.append([int(row[name]) for name in names])
                if rows[-1][0] < 0 or not 1 <= rows[-1][1] <= rows[-1][2]:
                    raise ValueError(f"{rows[-1]} in line {line}")
        if not rows:
            raise ValueError("no client in it")
        return tuple(np.array(rows, dtype=np.int64).reshape(-1, 3).T)
    except (OSError, KeyError, TypeError, ValueError, OverflowError, csv.Error) as error:
        got = error.strerror if isinstance(error, OSError) else f"{type(error).__name__} {error}"
        raise FederatedError(
            f"{wrong} {', '.join(names)}, with client ids from 0, rounds from 1 and from_round at most to_round; got "
            f"{got}: correct the file."
        ) from error
