"""The options that say who takes part in a round, and how much work each client does."""

from dataclasses import dataclass
from typing import Any

from lightning_fed.errors import FederatedError
from lightning_fed.sampling.availability import Availability
from lightning_fed.sampling.samplers import ClientSampler
from lightning_fed.sampling.stragglers import Stragglers
from lightning_fed.sampling.work import ClientWork

__all__ = ["Participation"]

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
