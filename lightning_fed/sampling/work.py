"""How many local steps each client takes in a round, at which learning rate and in which simulated time."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

import numpy as np
import numpy.typing as npt

from lightning_fed.core.seeding import Purpose, numpy_generator_for
from lightning_fed.errors import FederatedError, expect_choice, expect_number, expect_one_each, is_count, is_number

__all__ = ["ClientWork", "Stragglers", "UnequalWork", "Waited"]


class ClientWork(ABC):
    """Gives each client its own amount of work; subclass it and name your class under ``trainer.participation.work``.

    Attributes:
        changes_rates: Whether a learning-rate factor can differ from 1.
    """

    changes_rates: bool = True

    @abstractmethod
    def assign(
        self, round: int, steps: npt.NDArray[np.int64], steps_per_epoch: npt.NDArray[np.int64], seed: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Says what each client would do if it were drawn.

        Args:
            round: Round index, from 1.
            steps: Local steps of each client by ``local_epochs`` or ``local_steps``, shape (N,); 0 without batches.
            steps_per_epoch: The same for one local epoch.
            seed: The run's seed. The result must depend only on the arguments.

        Returns:
            Local steps, shape (N,); a factor on every learning rate of the client's optimizer, above 0, shape (N,).
        """

    def most(self, steps: int, steps_per_epoch: int) -> int:
        """Returns the most local steps of the client with the most samples: the length of a schedule by steps.

        By default these are the ``steps`` by ``local_epochs`` or ``local_steps``.
        """
        return steps


class UnequalWork(ClientWork):
    """Draws each client's steps or epochs, and its learning rate, uniformly from a range.

    ``epochs=[1, 20], share=0.9`` gives the 90 % of stragglers of FedProx (Li et al., MLSys 2020, section 5.2), and
    ``epochs=[2, 5]`` the unequal epochs of FedNova (Wang et al., NeurIPS 2020, section 6).

    Args:
        steps: Fewest and most local steps, [LOW, HIGH].
        epochs: Fewest and most local epochs, instead of steps.
        lr: Least and largest factor on the learning rate.
        share: Probability in [0, 1] that a client draws its own; the others follow the trainer's options.
        redraw: Whether clients draw anew in each round; else a client keeps its values for the whole run.
    """

    def __init__(
        self,
        steps: list[int] | None = None,
        epochs: list[int] | None = None,
        lr: list[float] | None = None,
        share: float = 1.0,
        redraw: bool = True,
    ) -> None:
        if (steps is not None and epochs is not None) or (steps is None and epochs is None and lr is None):
            raise FederatedError(
                "Expected either `--trainer.participation.work.steps` or `--trainer.participation.work.epochs`, or "
                f"`--trainer.participation.work.lr` alone, got {'none of them' if steps is None else 'both'}."
            )
        for name, given in (("steps", steps), ("epochs", epochs)):
            if given is not None and not (_is_range(given) and all(map(is_count, given))):
                raise _wrong_range(name, "two integers [LOW, HIGH] from 1 to 1e9", given)
        if lr is not None and not (_is_range(lr) and is_number(lr[0], above=0)):
            raise _wrong_range("lr", "two numbers [LOW, HIGH] above 0 and at most 1e9", lr)
        self.share = expect_number("--trainer.participation.work.share", share, least=0, most=1)
        self.steps, self.epochs, self.lr, self.redraw = steps, epochs, lr, redraw
        self.changes_rates = lr is not None

    def assign(
        self, round: int, steps: npt.NDArray[np.int64], steps_per_epoch: npt.NDArray[np.int64], seed: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Draws for every client, so that the result does not depend on the cohort."""
        stream = numpy_generator_for(seed, Purpose.WORK, round if self.redraw else 0)
        chosen, count, rate = stream.random((len(steps), 3)).T
        meant, given = chosen < self.share, self.steps or self.epochs
        if given is not None:
            drawn = given[0] + (count * (given[1] - given[0] + 1)).astype(np.int64)
            drawn = drawn if self.epochs is None else drawn * steps_per_epoch
            steps = np.where(meant & (steps > 0), drawn, steps)
        low, high = self.lr or (1.0, 1.0)
        return steps, np.where(meant, low + rate * (high - low), 1.0)

    def most(self, steps: int, steps_per_epoch: int) -> int:
        given = self.steps[1] if self.steps else self.epochs[1] * steps_per_epoch if self.epochs else steps
        return given if self.share == 1 else max(given, steps)


def _is_range(given: Sequence[float]) -> bool:
    return len(given) == 2 and all(is_number(each, most=1e9) for each in given) and given[0] <= given[1]


def _wrong_range(name: str, expected: str, got: object) -> FederatedError:
    option = f"--trainer.participation.work.{name}"
    return FederatedError(f"Expected `{option}` to be {expected}, LOW at most HIGH, got {got!r}.")


@dataclass(frozen=True)
class Waited:
    """Whose updates the server gets in a round.

    Attributes:
        kept: Places of these clients among the drawn ones, shape (k,).
        steps: Local steps of each, shape (k,).
        late: Clients that missed the deadline: left out, or stopped at it.
        seconds: Simulated time that the round takes.
    """

    kept: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]
    late: int
    seconds: float


class Stragglers:
    """Gives every client a speed, fixed for the whole run, and the server a simulated clock.

    A client that is left out does not really train, because its update would be lost: it costs no computing time.

    Args:
        deadline: Seconds after which the server stops waiting; by default it waits for all.
        late: What happens to a client that needs longer: it is left out (``drop``), or takes only the steps that it
            finishes in time (``partial``; it is left out if it finishes none).
        over_selection: Factor, at least 1, on the number of clients that are drawn; the server keeps the first
            ``clients_per_round`` to arrive. Bonawitz et al., MLSys 2019, draw 1.3 times as many.
        step_time: Seconds of a local step: the median over clients, or a list with one value for each client.
        spread: Standard deviation over clients of the logarithm of that time; not used for a list.
        exchange_time: Seconds that a client needs to get the model and send its update.
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
        self.late = expect_choice(f"{option}.late", late, ("drop", "partial"))
        self.over_selection = expect_number(f"{option}.over_selection", over_selection, least=1)
        self.spread = expect_number(f"{option}.spread", spread, least=0, most=10)
        self.exchange_time = expect_number(f"{option}.exchange_time", exchange_time, least=0)
        self.deadline = expect_number(f"{option}.deadline", deadline, above=exchange_time, optional=True)
        given = step_time if isinstance(step_time, list) else [step_time]
        if not all(is_number(each, above=0, most=1e9) for each in given):
            raise FederatedError(
                f"Expected `{option}.step_time` to be seconds above 0 and at most 1e9, or a list, got {step_time!r}."
            )
        self.step_time = step_time

    def selected(self, wanted: int) -> int:
        """Returns how many clients to draw to get ``wanted`` updates."""
        return ceil(round(self.over_selection * wanted, 6))  # rounded first: 1.1 * 10 is a little more than 11

    def step_times(self, num_clients: int, seed: int) -> npt.NDArray[np.float64]:
        """Returns the seconds of a local step of every client, shape (N,)."""
        if not isinstance(self.step_time, list):
            draws = numpy_generator_for(seed, Purpose.SPEED).standard_normal(num_clients)
            return self.step_time * np.exp(self.spread * draws)
        expect_one_each("--trainer.participation.stragglers.step_time", self.step_time, num_clients)
        return np.array(self.step_time, dtype=np.float64)

    def arrive(self, steps: npt.NDArray[np.int64], step_times: npt.NDArray[np.float64], wanted: int) -> Waited:
        """Finds out who arrives in time.

        Args:
            steps: Local steps of the drawn clients, at least 1, shape (n,).
            step_times: Seconds of one local step of each, shape (n,).
            wanted: Number of updates after which the server stops waiting.

        Returns:
            The first ``wanted`` clients to arrive, or all that arrive in time, in the order in which they were drawn.
        """
        deadline = inf if self.deadline is None else self.deadline
        times = self.exchange_time + steps * step_times
        # A step that ends exactly at the deadline counts, also if rounding makes it a little late.
        in_time = np.floor(np.minimum((deadline - self.exchange_time) / step_times + 1e-9, steps)).astype(np.int64)
        arriving = np.flatnonzero(in_time == steps if self.late == "drop" else in_time > 0)
        kept = np.sort(arriving[np.argsort(times[arriving], kind="stable")[:wanted]])
        short = min(wanted, len(steps)) - len(kept)
        late = int(np.count_nonzero(in_time[kept] < steps[kept])) + (len(steps) - len(kept) if short else 0)
        seconds = deadline if short else min(float(times[kept].max(initial=0.0)), deadline)
        return Waited(kept, in_time[kept], late, seconds)
