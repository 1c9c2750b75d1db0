"""Signs of life between two processes, played in one."""

from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed import HashStore

from lightning_fed.distributed import pulse as module
from lightning_fed.distributed.pulse import Failure, Pulse

Pair = tuple[Pulse, Pulse]


@pytest.fixture
def pair() -> Pair:
    """Both listen only when a test says so; two minutes of silence are too many."""
    store = HashStore()
    with patch.object(module.threading.Thread, "start"):
        pulses = Pulse(0, 2, store), Pulse(1, 2, store)
    for pulse in pulses:
        pulse.limit_s = 2.0
        pulse.begin(lambda: (" in round 7", "resume."))
    return pulses


def passes(pulse: Pulse, count: int = 1, works: bool = True) -> None:
    """Lets the thread of a process pass, while its work goes on or stands still."""
    for _ in range(count):
        pulse._passes += 1
        pulse._clock = (lambda now=pulse._passes: float(now)) if works else lambda: 0.0
        pulse._listen()


def test_two_that_work_hear_each_other(pair: Pair) -> None:
    for _ in range(10):
        passes(pair[0])
        passes(pair[1])
    assert pair[0].failure is pair[1].failure is None


@pytest.mark.parametrize("silent", [0, 1])
def test_one_that_makes_no_pass_is_named_with_the_round(pair: Pair, silent: int) -> None:
    passes(pair[silent])
    passes(pair[1 - silent], 5)
    failure = pair[1 - silent].failure
    assert failure is not None
    assert failure.lost
    assert f"but process {silent} has been silent for 0.0333 minutes" in failure.sentence
    assert "in round 7: look at its output, and resume." in failure.sentence


def test_one_whose_work_stands_still_is_silent_too(pair: Pair) -> None:
    for _ in range(5):
        passes(pair[1], works=False)
        passes(pair[0])
    assert pair[0].failure is not None
    passes(pair[1])
    assert pair[1].failure == pair[0].failure  # both end with the same words


def test_silence_outside_a_call_of_the_trainer_ends_nothing(pair: Pair) -> None:
    """As while one process does something of its own between two calls."""
    pair[0].is_active = False
    passes(pair[1])
    passes(pair[0], 9)
    assert pair[0].failure is None


def test_silence_before_a_call_is_none_of_it(pair: Pair) -> None:
    pair[0].is_active = False
    passes(pair[1])
    passes(pair[0], 9)
    pair[0].begin(lambda: ("", ""))
    passes(pair[0], 2)
    assert pair[0].failure is None
    passes(pair[0], 2)
    assert pair[0].failure is not None


def test_the_thread_that_trains_is_the_one_that_calls_the_trainer(pair: Pair) -> None:
    with patch.object(module, "_clock_of") as clock:
        caller = Thread(target=pair[0].begin, args=(lambda: ("", ""),))
        caller.start()
        caller.join()
    clock.assert_called_once_with(caller)


def test_a_first_process_that_answers_no_more_is_noticed(pair: Pair) -> None:
    """A thread waits for it then, and makes no pass."""
    for _ in range(4):
        pair[1]._look()
    failure = pair[1].failure
    assert failure is not None
    assert "process 0 has been silent" in failure.sentence


def test_the_first_failure_is_told_to_all(pair: Pair) -> None:
    for pulse, sentence in zip(pair, ("the first", "the second"), strict=True):
        with patch.object(pulse._said, "wait"):
            pulse.fail(Failure(sentence, lost=False))
    passes(pair[0])
    passes(pair[1])
    assert pair[0].failure == pair[1].failure == Failure("the first", lost=False)


def test_a_failure_of_a_call_does_not_concern_the_next_one(pair: Pair) -> None:
    with patch.object(pair[0]._said, "wait"):
        pair[0].fail(Failure("the first", lost=False))
    passes(pair[0])
    for pulse in pair:
        pulse.begin(lambda: ("", ""))
        passes(pulse)
        assert pulse.failure is None


@pytest.mark.parametrize(("rank", "lost", "says"), [(0, False, True), (1, False, False), (1, True, True)])
def test_a_process_that_does_not_end_is_ended(pair: Pair, rank: int, lost: bool, says: bool, capsys: Any) -> None:
    """Who has failed is said once, by the first process; who is lost by all, as the first may be."""
    with patch.object(module.os, "_exit") as leave:
        pair[rank].failure = Failure("It has failed.", lost)
        for _ in range(9):
            leave.assert_not_called()
            pair[rank]._look()
    leave.assert_called_once_with(1)
    assert ("It has failed." in capsys.readouterr().err) == says
