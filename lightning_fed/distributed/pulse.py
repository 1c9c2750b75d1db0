"""Signs of life: notices processes from which nothing comes any more, while others work or wait."""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch does not declare them

__all__ = ["ENDED", "Failure", "Pulse"]

ENDED = "has ended without a word (killed, or out of memory?)"

_PERIOD_S, _GRACE_S = 1.0, 8.0


class Failure(NamedTuple):
    """Why the processes of a run cannot go on.

    Attributes:
        sentence: What the user reads.
        lost: Whether a process is gone without a word; else it has said why itself.
    """

    sentence: str
    lost: bool


class Pulse:
    """A thread that tells the others once a second that this process lives, and listens whether they do.

    A process lives while the thread that trains uses its processor, as it also does while it waits for the others: one
    that is stopped does not, nor one that waits for what never comes. The first process listens to all others, they
    listen to the first. Why one of them fails is told to all; each ends at its next exchange, or by this thread where
    it does not come to one within seconds. Silence is counted in the thread's own passes, so that a run which is
    stopped as a whole goes on afterwards.

    Args:
        rank: Index of this process.
        size: Number of processes.
        store: What they share, held by the first one.

    Attributes:
        limit_s: Seconds of silence after which a process counts as lost.
        failure: Why the call of the trainer cannot go on, None while it can.
        is_active: Whether a call of the trainer runs, which a failure ends.
        is_stuck: Whether an exchange was left that torch's threads still wait in.
        position: Says in which round the run is, and how it goes on after a failure.
    """

    def __init__(self, rank: int, size: int, store: Store) -> None:
        self.limit_s = float("inf")
        self.failure: Failure | None = None
        self.is_active = self.is_stuck = False
        self.position: Callable[[], tuple[str, str]] = lambda: ("", "start it again.")
        self._rank = rank
        self._store = PrefixStore("pulse", store)
        self._heard = dict.fromkeys(range(1, size) if rank == 0 else range(1), (-1, 0))
        self._calls = self._passes = self._noticed = 0
        self._polls = (0, 0)
        self._saying: Failure | None = None
        self._said = threading.Event()
        self._used, self._clock = -1.0, _clock_of(threading.current_thread())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def begin(self, position: Callable[[], tuple[str, str]]) -> None:
        """Begins a call of the trainer, which all processes make; a failure of the one before does not concern it."""
        self._calls += 1
        self.failure = self._saying = None
        self._said.clear()
        self.position, self.is_active = position, True

    def fail(self, failure: Failure) -> None:
        """Tells all processes why the run cannot go on; only the first reason counts."""
        self._saying = failure
        self._said.wait(2 * _PERIOD_S)  # the thread says it, as the first process may answer no more

    def expect_first(self) -> None:
        """Notices a first process that answers no more, as this thread then makes no pass; called once a second."""
        passes, polls = self._polls
        self._polls = self._passes, polls + 1 if passes == self._passes else 0
        if self.failure is None and self._polls[1] * _PERIOD_S > self.limit_s:
            self.failure = self._silent(0)

    def note_loss(self, who: str, how: str) -> None:
        """Tells all processes that one is gone, if that ends a call of the trainer."""
        if self.is_active:
            self.fail(Failure(self.lost(who, how), lost=True))

    def lost(self, who: str, how: str) -> str:
        """Says that the run cannot go on without a process."""
        place, resume = self.position()
        return f"Expected every process of the run to go on, but {who} {how}{place}: look at its output, and {resume}"

    def end(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self._thread.join(2 * _PERIOD_S)

    def _run(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            self._passes += 1
            if self.failure is None:
                self._noticed = self._passes
                try:
                    self._listen()
                except RuntimeError:  # the store is gone, and the first process with it
                    self.failure = Failure(self.lost("process 0", ENDED), lost=True)
            elif self.is_active and (self._passes - self._noticed) * _PERIOD_S > _GRACE_S:
                self._end_process(self.failure)

    def _listen(self) -> None:
        used, key = self._clock(), f"failure {self._calls}"
        if used != self._used:
            self._used = used
            self._store.add(str(self._rank), 1)
        for other, (count, heard) in self._heard.items():
            now = self._store.add(str(other), 0)
            if now != count:
                self._heard[other] = now, self._passes
            elif (self._passes - heard) * _PERIOD_S > self.limit_s and self.is_active:
                self._saying = self._silent(other)
        if self._saying is not None:
            self._store.compare_set(key, "", f"{self._saying.lost:d}{self._saying.sentence}")
            self._said.set()
        if self._store.check([key]):
            said = self._store.get(key).decode()
            self.failure = Failure(said[1:], lost=said[0] == "1")

    def _silent(self, rank: int) -> Failure:
        how = f"has been silent for {self.limit_s / 60:.3g} minutes (stopped, or waiting for what never comes?)"
        return Failure(self.lost(f"process {rank}", how), lost=True)

    def _end_process(self, failure: Failure) -> None:
        """Ends this process, which is busy or stuck, without asking it."""
        if failure.lost or self._rank == 0:
            sys.stderr.write(f"{failure.sentence}\n")
        sys.stderr.flush()
        os._exit(1)


def _clock_of(thread: threading.Thread) -> Callable[[], float]:
    """Returns what reads the processor time that a thread has used; where that cannot be read, time itself."""
    if not hasattr(time, "pthread_getcpuclockid") or thread.ident is None:
        return time.monotonic
    clock = time.pthread_getcpuclockid(thread.ident)
    return lambda: time.clock_gettime(clock) if thread.is_alive() else time.monotonic()
