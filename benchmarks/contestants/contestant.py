"""One side of a row: who trains, and under which options."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Contestant", "Loop", "PLAIN", "PLAIN_FAST", "PLAIN_TIGHT"]

Loop = Literal["plain", "plain_fast", "plain_tight", "framework", "flower", "pfl", "fedlab"]


@dataclass(frozen=True)
class Contestant:
    """One side of a row.

    Attributes:
        loop: Whose loop trains.
        engine: The framework's engine; None for its default.
        devices: Processes that share the cohort.
        method: Aggregator and client algorithm of the framework, a key of ``framework.METHODS``.
        accelerator: ``cpu`` or ``gpu``.
        memory_format: How the framework lays out the weights of convolutions; None for its default.
        precision: ``32-true`` or ``bf16-mixed``, for which loops written by hand go under autocast.
    """

    loop: Loop = "framework"
    engine: str | None = None
    devices: int = 1
    method: str = "fedavg"
    accelerator: str = "cpu"
    precision: str = "32-true"
    memory_format: str | None = None

    @property
    def device(self) -> str:
        """The torch device of a single process."""
        return "cuda" if self.accelerator == "gpu" else "cpu"

    @property
    def text(self) -> str:
        """Names the side in tables."""
        words = [self.method] if self.method != "fedavg" else []
        words += [self.engine or "defaults"] if self.loop == "framework" else [self.loop.replace("_", " ")]
        words += [f"{self.devices} processes"] if self.devices > 1 else []
        words += [self.memory_format] if self.memory_format == "channels_last" else []
        words += [self.precision] if self.precision != "32-true" else []
        return ", ".join(words + (["GPU"] if self.accelerator == "gpu" else []))

    def as_dict(self) -> dict[str, Any]:
        """Returns the options."""
        return asdict(self)


PLAIN = Contestant("plain")

PLAIN_FAST = Contestant("plain_fast")

PLAIN_TIGHT = Contestant("plain_tight")
