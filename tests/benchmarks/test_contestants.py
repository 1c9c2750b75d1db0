"""Both sides of a row do the same work: steps, samples, and weights where the order of samples cannot matter."""

import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.contestants import choice, framework
from benchmarks.contestants.choice import missing, plain_loop
from benchmarks.contestants.contestant import PLAIN, PLAIN_FAST, PLAIN_TIGHT, Contestant
from benchmarks.race.turns import Turns
from benchmarks.tables import ROWS
from benchmarks.workloads import WORKS, Data, Work
from lightning_fed import FederatedCallback, Update
from tests.parts import quick_first

SMALL = {
    "A": replace(WORKS["A"], clients=6, size=25, per_round=3, batch=10),
    "B": replace(WORKS["B"], clients=8, size=7, per_round=8, batch=3),
    "C": replace(WORKS["C"], clients=2, size=3, per_round=2, batch=2),
    "D": replace(WORKS["D"], clients=3, size=5, per_round=2, batch=2),
}
FRAMEWORK = sorted({side for row in ROWS for side in (row.side, row.against) if side.loop == "framework"}, key=str)


class Counting(FederatedCallback):
    """Collects what every client of every round has done."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.samples: list[int] = []
        self.clients: list[int] = []

    def on_client_end(self, trainer: Any, pl_module: Any, update: Update) -> None:
        self.steps.append(update.num_steps)
        self.samples.append(update.client.num_samples)
        self.clients.append(update.client.id)


class NoTurns(Turns):
    """Goes on at once, and remembers the seconds."""

    def __init__(self) -> None:
        super().__init__("")
        self.seconds: list[float] = []

    def begin(self, barrier: Any = None) -> None:
        self.excluded, self.started = 0.0, time.perf_counter()

    def end(self) -> None:
        self.seconds.append(time.perf_counter() - self.started - self.excluded)


def train(work: Work, side: Contestant, data: Data, rounds: int) -> tuple[Tensor, Counting]:
    """Trains the framework; returns the global vector and the counts."""
    counting = Counting()
    callbacks = [*framework.METHODS[side.method](), counting]
    trainer = framework.make_trainer(side, callbacks, max_rounds=rounds, clients_per_round=work.per_round)
    trainer.fit(framework.make_model(work), framework.make_datamodule(work, data))
    return trainer.weights, counting


def count_steps(loop: Any, rounds: int) -> int:
    """Runs a loop written by hand; returns its optimizer steps."""
    taken: list[int] = []
    loop.optimizer.register_step_post_hook(lambda *_: taken.append(1))
    for number in range(rounds):
        loop.round(number)
    return len(taken)


def without_order(work: Work) -> Data:
    """Data in which all samples of a client are the same one, so that their order changes nothing."""
    data = work.data()
    for rows in data.clients:
        data.images[rows], data.labels[rows] = data.images[rows[0]].clone(), data.labels[rows[0]].clone()
    return data


def weights_of(loop: Any) -> Tensor:
    return torch.cat([weight.flatten() for weight in loop.weights])


@pytest.mark.parametrize("key", SMALL)
@pytest.mark.slow
def test_a_round_of_every_side_has_the_steps_and_samples_of_the_work(key: str) -> None:
    work, data = SMALL[key], SMALL[key].data()
    assert count_steps(plain_loop(PLAIN, work, data), rounds=2) == 2 * work.steps
    assert count_steps(plain_loop(PLAIN_FAST, work, data), rounds=2) == 2 * work.steps
    _, counting = train(work, Contestant(engine="sequential"), data, rounds=2)
    assert sum(counting.steps) == 2 * work.steps
    assert sum(counting.samples) == 2 * work.samples
    assert len(counting.clients) == 2 * work.per_round


@pytest.mark.parametrize(
    "side",
    [side for side in FRAMEWORK if side.devices == 1],
    ids=lambda side: side.text,
)
@pytest.mark.quick(12)
def test_every_side_of_the_framework_takes_the_same_steps(side: Contestant) -> None:
    assert missing(side) is None
    work = SMALL["B" if side.method in ("fedavg", "bulyan") else "A"]  # others need layers, Bulyan clients
    _, counting = train(work, side, work.data(), rounds=2)
    assert sum(counting.steps) == 2 * work.steps


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("key", quick_first(2, ["A", "B", "C"]))
def test_the_framework_and_the_loop_by_hand_end_with_the_same_weights(key: str, engine: str) -> None:
    side = Contestant(engine=engine, memory_format="preserve")
    assert missing(side) is None
    work = replace(SMALL[key], per_round=SMALL[key].clients)
    data = without_order(work)
    loop = plain_loop(PLAIN, work, data)
    start = weights_of(loop).clone()
    for number in range(2):
        loop.round(number)
    weights, _ = train(work, side, data, rounds=2)
    assert (weights - weights_of(loop)).norm() < 1e-3 * (weights - start).norm()


@pytest.mark.parametrize("key", SMALL)
@pytest.mark.quick(2)
def test_the_fast_loop_differs_in_layout_and_kernel_only(key: str) -> None:
    work = SMALL[key]
    loops = [plain_loop(side, work, work.data()) for side in (PLAIN, PLAIN_FAST)]
    fast = loops[1]
    assert fast.optimizer.defaults["fused"]
    assert fast.images.is_contiguous(memory_format=torch.channels_last)
    assert fast.images[:2][torch.tensor([1, 0])].is_contiguous(memory_format=torch.channels_last)
    convolutions = [p for p in fast.model.parameters() if p.ndim == 4]
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in convolutions)
    assert [w.stride() for w in fast.weights] == [p.stride() for p in fast.model.parameters()]
    if key != "D":  # its dropout draws in the order of memory
        start = weights_of(fast).clone()
        for loop in loops:
            loop.round(0)
        # In float32, where kernels sum in another order on each processor: another loop would be another model.
        assert (weights_of(loops[0]) - weights_of(fast)).norm() < 5e-2 * (weights_of(fast) - start).norm()


@pytest.mark.parametrize("key", ["A", "B", "C"])
def test_the_tight_loop_takes_the_same_steps(key: str) -> None:
    work = SMALL[key]
    loops = [plain_loop(side, work, work.data()) for side in (PLAIN, PLAIN_TIGHT)]
    start = weights_of(loops[0]).clone()
    for loop in loops:
        loop.round(0)
    plain, tight = map(weights_of, loops)
    assert (plain - tight).norm() < 1e-5 * (plain - start).norm()


def test_the_exchange_of_gradients_is_excluded_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_fed.engines.start_gradients import ComputedStartGradients

    work, clock, begin = SMALL["B"], SimpleNamespace(now=1.0), ComputedStartGradients.begin_round

    def begin_slowly(self: ComputedStartGradients, *args: Any) -> Any:
        clock.now += 0.3
        return begin(self, *args)

    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr(ComputedStartGradients, "begin_round", begin_slowly)
    monkeypatch.setattr(framework, "time", clock)
    monkeypatch.setitem(globals(), "time", clock)
    for method, kept in (("fedga", 0.0), ("fedavg", 0.3)):
        turns = NoTurns()
        framework.take_part(turns, work, Contestant(engine="sequential", method=method), rounds=2)
        assert turns.seconds == pytest.approx([kept, kept]), method


def test_rows_have_different_names_and_known_works() -> None:
    assert len({row.key for row in ROWS}) == len(ROWS)
    assert all(row.key.startswith(f"{row.work}-") and row.work in WORKS for row in ROWS)
    assert all(side.method in framework.METHODS for row in ROWS for side in (row.side, row.against))


def test_a_side_that_the_package_refuses_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice.os, "sched_getaffinity", lambda pid: {0}, raising=False)
    assert missing(Contestant(devices=2)) == "2 processes on 1 core would tell nothing"
    assert missing(PLAIN) is None
    refused = missing(Contestant(precision="16-mixed"))
    assert refused is not None
    assert "--trainer.precision" in refused
    monkeypatch.setattr(framework, "FederatedTrainer", partial(lambda accelerator: None))
    assert missing(Contestant(engine="vectorized")) == "the installed FederatedTrainer has no argument `engine`"


@pytest.mark.parametrize("loop", ["plain", "plain_fast", "plain_tight"])
def test_loops_by_hand_go_under_autocast_and_keep_float32_weights(loop: Any) -> None:
    work = SMALL["A"]
    by_hand = plain_loop(Contestant(loop, precision="bf16-mixed"), work, work.data())
    exact = plain_loop(Contestant(loop), work, work.data())
    for each in (by_hand, exact):
        each.round(0)
    difference = (weights_of(by_hand) - weights_of(exact)).abs().max()
    assert weights_of(by_hand).dtype == torch.float32
    assert 1e-7 < difference < 1e-2


@pytest.mark.slow
def test_the_parts_of_a_round_are_timed() -> None:
    words = [sys.executable, "-m", "benchmarks.profile", "B-vectorized", "--rounds", "2", "--accelerator", "cpu"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]
    rows = re.findall(r"^\| ([a-z ]+) \| ([0-9.]+) \|", done.stdout, re.MULTILINE)
    parts = {name: float(ms) for name, ms in rows}
    assert {"gradients of many clients", "gathering batches", "optimizer", "waiting for the device"} < set(parts)
    assert 0 < parts["gradients of many clients"] < parts["training the cohort"] < parts["round"]
