"""How many local steps each client takes in a round, and at which learning rate."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lightning_fed.core.seeding import Purpose, numpy_generator_for
from lightning_fed.errors import FederatedError, expect_number, is_count, is_number

__all__ = ["ClientWork", "UnequalWork"]


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
