"""Sides train by turns, in threads and processes, and one that fails ends the race with its reason."""

import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from benchmarks.contestants.choice import missing
from benchmarks.contestants.contestant import PLAIN, Contestant
from benchmarks.race.referee import ProcessHandle, ThreadHandle, race
from benchmarks.race.rows import run_row
from benchmarks.race.turns import ContestantFailed, Turns
from benchmarks.race.worker import child_command
from benchmarks.tables import Row
from benchmarks.workloads import WORKS


class Clock:
    """Time that passes when it is told to, however busy the machine is."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("benchmarks.race.turns.time", clock)
    return clock


class Sleeper:
    """A side that lets time pass, and writes down its rounds."""

    def __init__(self, name: str, seconds: float, diary: list[str], clock: Clock) -> None:
        self.name, self.seconds, self.diary, self.clock = name, seconds, diary, clock

    def __call__(self, turns: Turns, rounds: int = 6) -> None:
        for _ in range(rounds):
            turns.begin()
            self.diary.append(self.name)
            self.clock.now += self.seconds
            turns.end()


def test_rounds_alternate_and_the_first_repeat_does_not_count(clock: Clock) -> None:
    diary: list[str] = []
    handles = [ThreadHandle(name, Sleeper(name, s, diary, clock)) for name, s in (("slow", 0.05), ("quick", 0.01))]
    try:
        pairs = race(handles[0], handles[1], repeats=2, rounds=2)
    finally:
        for handle in handles:
            handle.close()
    assert (
        diary == ["slow", "slow", "quick", "quick"] + ["quick", "quick", "slow", "slow"] + ["slow"] * 2 + ["quick"] * 2
    )
    assert pairs == [pytest.approx((0.05, 0.01))] * 2


def test_what_is_excluded_does_not_count(clock: Clock) -> None:
    def side(turns: Turns) -> None:
        turns.begin()
        clock.now += 0.3
        turns.excluded += 0.1
        turns.end()

    handle = ThreadHandle("side", side)
    assert handle.round() == pytest.approx(0.2)
    handle.close()


def test_a_side_that_fails_is_named_with_its_reason() -> None:
    def side(turns: Turns) -> None:
        turns.begin()
        raise ValueError("no\nluck")

    handle = ThreadHandle("side", side)
    with pytest.raises(ContestantFailed, match="side: ValueError: no luck"):
        handle.round()
    handle.close()


def test_a_thread_ends_when_the_race_is_over_before_it(clock: Clock) -> None:
    handle = ThreadHandle("side", Sleeper("side", 0.0, [], clock))
    handle.round()
    handle.close()
    assert not handle.is_alive()
    assert "race" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("words", [["-c", "raise SystemExit('no such thing')"], ["-c", "print('quiet end')"]])
def test_a_process_that_ends_is_named_with_its_last_words(tmp_path: Path, words: list[str]) -> None:
    handle = ProcessHandle("child", lambda address: [sys.executable, *words], tmp_path / "child.log")
    with pytest.raises(ContestantFailed, match="child: it did not start: (no such thing|quiet end)"):
        handle.round()
    handle.close()


@pytest.mark.slow
def test_a_side_in_a_process_tells_its_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = Path(__file__).resolve().parents[2]
    monkeypatch.chdir(repository)
    handle = ProcessHandle("child", partial(child_command, "B", PLAIN, 2), tmp_path / "child.log")
    try:
        assert all(handle.round() > 0 for _ in range(2))
    finally:
        handle.close()
    assert not handle.is_alive()


@pytest.mark.slow
def test_two_processes_tell_their_rounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    side = Contestant(devices=2)
    if (reason := missing(side)) == "2 processes on 1 core would tell nothing":
        pytest.skip(reason)
    figures = run_row(Row("B-2", "B", side), 2, tmp_path)
    assert len(figures.get("ratios", [])) == 2, figures


def test_a_row_gives_figures_or_says_why_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(WORKS, "B", WORKS["B"].__class__(**{**vars(WORKS["B"]), "clients": 4, "per_round": 2}))
    figures = run_row(Row("B-plain", "B", PLAIN), 3, tmp_path)
    assert len(figures["ratios"]) == 3
    assert figures["ratio_min"] <= figures["ratio"] <= figures["ratio_max"]
    assert "--trainer.precision" in run_row(Row("B", "B", Contestant(precision="16-mixed")), 1, tmp_path)["skipped"]
    monkeypatch.setattr("benchmarks.race.rows.missing", lambda side: None)
    assert "--trainer.precision" in run_row(Row("B", "B", Contestant(precision="16-mixed")), 1, tmp_path)["failed"]
