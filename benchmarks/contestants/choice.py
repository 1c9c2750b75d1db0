"""What can stand on either side of a row: the loops written by hand, the framework under its options, and peers."""

import os
from importlib import import_module

import torch
from torch import Tensor, nn

from benchmarks.contestants.contestant import Contestant
from benchmarks.contestants.plain import PlainFedAvg
from benchmarks.contestants.plain_fast import PlainFastFedAvg
from benchmarks.contestants.plain_tight import PlainTightFedAvg
from benchmarks.race.turns import Turns
from benchmarks.workloads import WORKS, Data, Work

__all__ = ["missing", "plain_loop", "take_part"]


# Modules with a function `take_part` of the arguments of the one here; imported only for a side that needs them.
_MODULES = {
    "framework": "benchmarks.contestants.framework",
    "flower": "benchmarks.contestants.flower",
    "pfl": "benchmarks.contestants.pfl",
    "fedlab": "benchmarks.contestants.fedlab",
}


def missing(side: Contestant) -> str | None:
    """Says in one line why a side cannot train here; None if nothing is known against it."""
    if side.accelerator == "gpu" and not torch.cuda.is_available():
        return "no CUDA device here"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if side.accelerator == "cpu" and side.devices > cores:
        return f"{side.devices} processes on {cores} core would tell nothing"
    if side.loop == "framework":
        from benchmarks.contestants.framework import refusal

        return refusal(side)
    if side.loop in _MODULES:
        from benchmarks.contestants.installed import why_not

        return why_not(side.loop)
    return None


def take_part(turns: Turns, key: str, side: Contestant, rounds: int) -> None:
    """Trains a side's rounds, each at its turn.

    Args:
        turns: The turns.
        key: Key of the work.
        side: What trains.
        rounds: Rounds over all repeats.
    """
    if side.loop in _MODULES:
        import_module(_MODULES[side.loop]).take_part(turns, WORKS[key], side, rounds)
        return
    loop = plain_loop(side, WORKS[key], WORKS[key].data())
    for number in range(rounds):
        turns.begin()
        loop.round(number)
        turns.end()


def plain_loop(side: Contestant, work: Work, data: Data) -> PlainFedAvg:
    """Makes a loop written by hand, on the side's device."""
    model, data = work.model().to(side.device), data.to(side.device)
    if side.precision == "bf16-mixed":
        model = _Autocast(model, side.device)
    kinds = {"plain": PlainFedAvg, "plain_fast": PlainFastFedAvg, "plain_tight": PlainTightFedAvg}
    return kinds[side.loop](
        model, data.images, data.labels, data.clients, work.per_round, work.batch, work.lr, work.momentum
    )


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
