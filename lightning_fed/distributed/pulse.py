"""Signs of life: notices processes that have stopped or died, while others work or wait."""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from torch.distributed import PrefixStore, Store, Work  # type: ignore[attr-defined]  # torch does not declare them

__all__ = ["ENDED", "Failure", "Pulse", "when_orphaned"]

ENDED = "has ended without a message (killed, or out of memory?)"

_PERIOD_S, _GRACE_S = 1.0, 8.0


class Failure(NamedTuple):
    """Why the processes of a run cannot go on.

    Attributes:
        sentence: The message for you.
        lost: Whether a process has ended without a message; otherwise the message is its own.
    """

    sentence: str
    lost: bool


class Pulse:
    """Tells the others once a second that this process lives, and checks that they live, in its own threads.

    A process counts as alive while its training thread uses the processor, which it also does while it waits for the
    others. A stopped process does not, nor one that waits for something that never comes. The first process checks all
    others; they check the first. All learn why a process failed, and each ends at its next exchange, or is killed here
    after some seconds without one. Silence is counted in passes of the threads, so a run can be paused as a whole.

    Args:
        rank: Index of this process.
        size: Number of processes.
        store: torch's shared store; the first process holds it.

    Attributes:
        limit_s: Seconds of silence after which a process counts as lost.
        failure: Why the call of the trainer cannot go on, None while it can.
        is_active: Whether a call of the trainer is running, which a failure ends.
        given_up: Torch's exchanges that this process stopped waiting for; torch's threads may still wait.
        position: Returns the round of the run, and how you can resume it after a failure.
    """

    def __init__(self, rank: int, size: int, store: Store) -> None:
        self.limit_s = float("inf")
        self.failure: Failure | None = None
        self.is_active = False
        self.given_up: list[Work] = []
        self.position: Callable[[], tuple[str, str]] = lambda: ("", "start it again.")
        self._rank = rank
        self._store = PrefixStore("pulse", store)
        self._heard = dict.fromkeys(range(1, size) if rank == 0 else range(1), (-1, 0))
        self._calls = self._passes = self._seen = self._standing = self._failing = 0
        self._saying: Failure | None = None
        self._said = threading.Event()
        self._used, self._clock = -1.0, _clock_of(threading.current_thread())
        self._ended = threading.Event()
        # Two threads, as one may wait for the first process, which may no longer answer.
        for work in (self._pass, self._look):
            threading.Thread(target=self._repeat, args=(work,), daemon=True).start()

    def begin(self, position: Callable[[], tuple[str, str]]) -> None:
        """Begins a call of the trainer, which all processes make, in the training thread.

        A failure of an earlier call, or silence between two calls, does not end this one.
        """
        self._calls += 1
        self._clock = _clock_of(threading.current_thread())
        self._heard = {other: (count, self._passes) for other, (count, _) in self._heard.items()}
        self.failure = self._saying = None
        self._said.clear()
        self.position, self.is_active = position, True

    def fail(self, failure: Failure) -> None:
        """Tells all processes why the run cannot go on; only the first reason counts."""
        self._saying = failure
        self._said.wait(2 * _PERIOD_S)  # a thread sends it, as the first process may no longer answer

    def note_loss(self, who: str, how: str) -> None:
        """Tells all processes that one has ended, if a call of the trainer is running."""
        if self.is_active:
            self.fail(Failure(self.lost(who, how), lost=True))

    def lost(self, who: str, how: str) -> str:
        """Returns the message that the run cannot go on without a process."""
        place, resume = self.position()
        return f"Expected every process of the run to go on, but {who} {how}{place}: look at its output, and {resume}"

    def end(self) -> None:
        """Ends the threads."""
        self._ended.set()
        time.sleep(0.1)  # a thread may still use the store, which is closed next

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self._ended.wait(_PERIOD_S):
            work()

    def _pass(self) -> None:
        self._passes += 1
        if self.failure is None:
            try:
                self._listen()
            except RuntimeError:  # the store has closed, so the first process has ended
                self.failure = Failure(self.lost("process 0", ENDED), lost=True)

    def _look(self) -> None:
        """Notices silence, and ends this process if it does not end by itself after a failure."""
        self._standing = self._standing + 1 if self._seen == self._passes else 0
        self._seen = self._passes
        if self.failure is None:
            self._failing = 0
            if self.is_active and self._standing * _PERIOD_S > self.limit_s:
                self.failure = self._silent(0)
        elif self.is_active:
            self._failing += 1
            if self._failing * _PERIOD_S > _GRACE_S:
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
        how = f"has been silent for {self.limit_s / 60:.3g} minutes (stopped, or waiting for ever?)"
        return Failure(self.lost(f"process {rank}", how), lost=True)

    def _end_process(self, failure: Failure) -> None:
        """Kills this process, which is busy or stuck."""
        if failure.lost or self._rank == 0:
            sys.stderr.write(f"{failure.sentence}\n")
        sys.stderr.flush()
        os._exit(1)


def _clock_of(thread: threading.Thread) -> Callable[[], float]:
    """Returns a function that reads the processor time of a thread, or the wall-clock time if that is impossible."""
    if not hasattr(time, "pthread_getcpuclockid") or thread.ident is None:
        return time.monotonic
    clock = time.pthread_getcpuclockid(thread.ident)
    return lambda: time.clock_gettime(clock) if thread.is_alive() else time.monotonic()


def when_orphaned(act: Callable[[], None]) -> None:
    """Calls ``act``, in a thread, once the process that has started this one is gone."""
    parent = os.getppid()

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(_PERIOD_S)
        act()

    threading.Thread(target=wait, daemon=True).start()
