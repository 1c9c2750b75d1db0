"""Where the time of a row's rounds goes.

    python -m benchmarks.profile B-vectorized

trains the row's side alone, with a clock around each part; of several processes the first one's count. Parts that call
each other are not subtracted from one another, and what a clock costs, about 0.3 µs a call, is in the part around it.
With ``--accelerator gpu`` a part is the time in which the host asks for its work, and waits for it in one of them.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from itertools import pairwise
from typing import Any

import torch

from benchmarks.contestants.framework import METHODS, make_datamodule, make_model, make_trainer
from benchmarks.tables import ROWS
from benchmarks.workloads import WORKS
from lightning_fed import FederatedCallback
from lightning_fed.core.optimizer.flat import FlatOptimizer
from lightning_fed.data import TensorSource
from lightning_fed.distributed.processes import Processes
from lightning_fed.engines.base import Engine
from lightning_fed.engines.divergence import DivergenceWatch
from lightning_fed.engines.local_step import LocalStep
from lightning_fed.engines.sequential import SequentialTrainer
from lightning_fed.engines.vectorized import VectorizedTrainer
from lightning_fed.engines.vectorized.batches import LaneBatches
from lightning_fed.engines.vectorized.step import StackedStep
from lightning_fed.sampling import CohortDraw
from lightning_fed.trainer.loop import RoundLoop

__all__ = ["PARTS", "Clocks", "profile"]

# What is timed, in words, and the method behind it.
PARTS: dict[str, tuple[type, str]] = {
    "round": (RoundLoop, "_run_round"),
    "training the cohort": (Engine, "train"),
    "a client, one after another": (SequentialTrainer, "train_client"),
    "local step of one client": (LocalStep, "step"),
    "gradients of many clients": (StackedStep, "__call__"),
    "gathering batches": (TensorSource, "gather"),
    "arranging clients and shuffling": (LaneBatches, "__init__"),
    "optimizer": (FlatOptimizer, "step"),
    "looking for divergence": (VectorizedTrainer, "_finite"),
    "waiting for the device": (DivergenceWatch, "read"),
    "entering the round": (Engine, "_enter"),
    "drawing the cohort": (CohortDraw, "draw"),
    "server step": (RoundLoop, "_step_server"),
    "exchanging objects": (Processes, "exchange"),
    "adding over processes": (Processes, "sum"),
    "row of the round": (RoundLoop, "_finish_round"),
}
_WARM_UP = 5


class Clocks(FederatedCallback):
    """Adds up the seconds of each part, and notes when rounds begin."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.starts: list[float] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Notes the time; what comes before the first rounds are over does not count."""
        self.starts.append(time.perf_counter())
        if len(self.starts) == _WARM_UP + 1:
            self.seconds.clear()

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Puts a clock around a function."""

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - started

        return timed


def profile(key: str, rounds: int, accelerator: str | None = None) -> tuple[float, dict[str, float]]:
    """Trains the side of a row; returns the median of a round and the mean of each part, in milliseconds."""
    row, clocks = next(row for row in ROWS if row.key == key), Clocks()
    work, side = WORKS[row.work], replace(row.side, accelerator=accelerator or row.side.accelerator)
    for name, (owner, method) in PARTS.items():
        setattr(owner, method, clocks.around(name, getattr(owner, method)))
    callbacks = [*METHODS[side.method](), clocks]
    trainer = make_trainer(side, callbacks, max_rounds=rounds + _WARM_UP, clients_per_round=work.per_round)
    trainer.fit(make_model(work), make_datamodule(work, work.data()))
    if trainer.global_rank > 0:
        raise SystemExit
    times = [after - before for before, after in pairwise(clocks.starts[_WARM_UP:])]
    return 1e3 * statistics.median(times), {name: 1e3 * s / rounds for name, s in clocks.seconds.items() if s}


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=[row.key for row in ROWS if row.side.loop == "framework"])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), help="where the side trains, in place of the row's")
    given = parser.parse_args()
    torch.set_num_threads(1)
    median, parts = profile(given.row, given.rounds, given.accelerator)
    print(f"{given.row}: {median:.2f} ms a round (median of {given.rounds})\n")
    print("| part | ms a round | of it |\n| --- | --- | --- |")
    for name in PARTS:
        if name in parts:
            print(f"| {name} | {parts[name]:.2f} | {parts[name] / parts['round']:.0%} |")


if __name__ == "__main__":
    main()
