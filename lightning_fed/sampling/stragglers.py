"""How long clients take, in simulated time, and what becomes of those that are late."""

from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

import numpy as np
import numpy.typing as npt

from lightning_fed.core.seeding import Purpose, numpy_generator_for
from lightning_fed.errors import FederatedError, expect_choice, expect_number, expect_one_each, is_number

__all__ = ["Arrivals", "Stragglers"]


@dataclass(frozen=True)
class Arrivals:
    """Whose updates the server gets in a round.

    Attributes:
        kept: Places of these clients among those that were drawn, shape (k,).
        steps: Local steps of each, shape (k,).
        late: Clients that missed the deadline: left out, or stopped at it.
        seconds: Simulated time that the round takes.
    """

    kept: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]
    late: int
    seconds: float


class Stragglers:
    """Gives every client a speed, for the whole run, and the server a clock.

    A client that is left out does not train, as its work would be lost; it costs no time here.

    Args:
        deadline: Seconds after which the server waits no longer; it waits for all by default.
        late: What becomes of a client whose steps take longer: it is left out (``drop``), or takes those steps alone
            that it has finished by then (``partial``; without any it is left out).
        over_selection: Factor, at least 1, by which more clients are drawn than ``clients_per_round``: the server takes
            the first so many to arrive. Bonawitz et al., MLSys 2019, draw 1.3 times as many.
        step_time: Seconds of a local step, the median over clients; a list has those of each client.
        spread: Standard deviation of their logarithm over clients; of no account for a list.
        exchange_time: Seconds in which a client gets the model and sends its update.
    """

    def __init__(
        self,
        deadline: float | None = None,
        late: Literal["drop", "partial"] = "drop",
        over_selection: float = 1.0,
        step_time: float | list[float] = 1.0,
        spread: float = 0.5,
        exchange_time: float = 0.0,
    ) -> None:
        option = "--trainer.participation.stragglers"
        expect_choice(f"{option}.late", late, ("drop", "partial"))
        expect_number(f"{option}.over_selection", over_selection, least=1)
        expect_number(f"{option}.spread", spread, least=0, most=10)
        expect_number(f"{option}.exchange_time", exchange_time, least=0)
        if deadline is not None:
            expect_number(f"{option}.deadline", deadline, above=exchange_time)
        given = step_time if isinstance(step_time, list) else [step_time]
        if not all(is_number(each, above=0, most=1e9) for each in given):
            raise FederatedError(
                f"Expected `{option}.step_time` to be seconds above 0 and at most 1e9, or a list, got {step_time!r}."
            )
        self.deadline, self.late, self.over_selection = deadline, late, over_selection
        self.step_time, self.spread, self.exchange_time = step_time, spread, exchange_time

    def selected(self, wanted: int) -> int:
        """Returns how many clients are drawn where so many are wanted."""
        return ceil(round(self.over_selection * wanted, 6))  # 1.1 times 10 are 11

    def step_times(self, num_clients: int, seed: int) -> npt.NDArray[np.float64]:
        """Returns the seconds of a local step of every client, shape (N,)."""
        if not isinstance(self.step_time, list):
            draws = numpy_generator_for(seed, Purpose.SPEED).standard_normal(num_clients)
            return self.step_time * np.exp(self.spread * draws)
        expect_one_each("--trainer.participation.stragglers.step_time", self.step_time, num_clients)
        return np.array(self.step_time, dtype=np.float64)

    def arrive(self, steps: npt.NDArray[np.int64], step_times: npt.NDArray[np.float64], wanted: int) -> Arrivals:
        """Finds out who arrives in time.

        Args:
            steps: Local steps of the clients that were drawn, at least 1, shape (n,).
            step_times: Seconds of one of theirs, shape (n,).
            wanted: Updates after which the server waits no longer.

        Returns:
            The first ``wanted`` to arrive, or all that do so by the deadline, in the order in which they were drawn.
        """
        deadline = inf if self.deadline is None else self.deadline
        times = self.exchange_time + steps * step_times
        # A step that ends with the deadline counts, whatever rounding makes of it.
        in_time = np.floor(np.minimum((deadline - self.exchange_time) / step_times + 1e-9, steps)).astype(np.int64)
        arriving = np.flatnonzero(in_time == steps if self.late == "drop" else in_time > 0)
        kept = np.sort(arriving[np.argsort(times[arriving], kind="stable")[:wanted]])
        short = min(wanted, len(steps)) - len(kept)
        late = int(np.count_nonzero(in_time[kept] < steps[kept])) + (len(steps) - len(kept) if short else 0)
        seconds = deadline if short else min(float(times[kept].max(initial=0.0)), deadline)
        return Arrivals(kept, in_time[kept], late, seconds)
