"""What can stand on either side of a row: the loops written by hand, the framework under its options, and peers."""

import os
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.plain import PlainFedAvg
from benchmarks.plain_fast import PlainFastFedAvg
from benchmarks.turns import Turns
from benchmarks.work import WORKS, Data, Work

__all__ = ["PLAIN", "PLAIN_FAST", "Side", "missing", "plain_loop", "play"]

Loop = Literal["plain", "plain_fast", "framework", "flower", "pfl", "fedlab"]

# Modules with a function `play` of the arguments of the one here; imported only for a side that needs them.
_MODULES = {
    "framework": "benchmarks.framework",
    "flower": "benchmarks.peer_flower",
    "pfl": "benchmarks.peer_pfl",
    "fedlab": "benchmarks.peer_fedlab",
}


@dataclass(frozen=True)
class Side:
    """One side of a row.

    Attributes:
        loop: Whose loop trains.
        engine: The framework's engine; None for its default.
        devices: Processes that share the cohort.
        method: Aggregator and client algorithm of the framework, a key of ``framework.METHODS``.
        accelerator: ``cpu`` or ``gpu``.
        memory_format: How the framework lays out the weights of convolutions.
        precision: ``32-true`` or ``bf16-mixed``, for which loops written by hand go under autocast.
        compile: Whether the framework compiles the local step.
    """

    loop: Loop = "framework"
    engine: str | None = None
    devices: int = 1
    method: str = "fedavg"
    accelerator: str = "cpu"
    precision: str = "32-true"
    memory_format: str = "preserve"
    compile: bool = False

    @property
    def device(self) -> str:
        """The torch device of a single process."""
        return "cuda" if self.accelerator == "gpu" else "cpu"

    @property
    def text(self) -> str:
        """Names the side in tables."""
        words = [self.method] if self.method != "fedavg" else []
        words += [self.engine or "default engine"] if self.loop == "framework" else [self.loop.replace("_", " ")]
        words += ["compiled"] if self.compile else []
        words += [f"{self.devices} processes"] if self.devices > 1 else []
        words += [self.memory_format] if self.memory_format != "preserve" else []
        words += [self.precision] if self.precision != "32-true" else []
        return ", ".join(words + (["GPU"] if self.accelerator == "gpu" else []))

    def as_dict(self) -> dict[str, Any]:
        """Returns the options."""
        return asdict(self)


PLAIN, PLAIN_FAST = Side("plain"), Side("plain_fast")


def missing(side: Side) -> str | None:
    """Says in one line why a side cannot train here; None if nothing is known against it."""
    if side.accelerator == "gpu" and not torch.cuda.is_available():
        return "no CUDA device here"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if side.accelerator == "cpu" and side.devices > cores:
        return f"{side.devices} processes on {cores} core would tell nothing"
    if side.loop == "framework":
        from benchmarks.framework import refusal

        return refusal(side)
    if side.loop in _MODULES:
        from benchmarks.peers import why_not

        return why_not(side.loop)
    return None


def play(turns: Turns, key: str, side: Side, rounds: int) -> None:
    """Trains a side's rounds, each at its turn.

    Args:
        turns: The turns.
        key: Key of the work.
        side: What trains.
        rounds: Rounds over all repeats.
    """
    if side.loop in _MODULES:
        import_module(_MODULES[side.loop]).play(turns, WORKS[key], side, rounds)
        return
    loop = plain_loop(side, WORKS[key], WORKS[key].data())
    for number in range(rounds):
        turns.begin()
        loop.round(number)
        turns.end()


def plain_loop(side: Side, work: Work, data: Data) -> PlainFedAvg:
    """Makes a loop written by hand, on the side's device."""
    model, data = work.model().to(side.device), data.to(side.device)
    if side.precision == "bf16-mixed":
        model = _Autocast(model, side.device)
    kind = PlainFedAvg if side.loop == "plain" else PlainFastFedAvg
    return kind(model, data.images, data.labels, data.clients, work.per_round, work.batch, work.lr, work.momentum)


class _Autocast(nn.Module):
    """A model in bfloat16 whose scores are float32, as the loss takes them under Lightning's bf16-mixed."""

    def __init__(self, model: nn.Module, device: str) -> None:
        super().__init__()
        self.model, self.device = model, device

    def forward(self, x: Tensor) -> Tensor:
        """Computes scores."""
        with torch.autocast(self.device, torch.bfloat16):
            scores: Tensor = self.model(x)
        return scores.float()
