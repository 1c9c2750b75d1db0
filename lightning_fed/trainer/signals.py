"""Handles Ctrl-C and SIGTERM: the run finishes its round, saves and stops; a second Ctrl-C stops at once."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["StopRequest", "graceful_stop"]


class StopRequest:
    """Remembers the signal that asked the run to stop; all processes get it, but only one prints that it stops.

    Attributes:
        process: The id of the process that started the run.
    """

    def __init__(self, speaks: bool = True) -> None:
        self.signum: int | None = None
        self._speaks = speaks
        self.process = os.getpid()

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Handles a signal: the first one asks for a stop after the round, the second one interrupts at once."""
        if os.getpid() != self.process:  # a forked worker inherits the handler; the signal is for the trainer
            return
        if self.signum is not None:
            raise KeyboardInterrupt
        self.signum = signum
        if self._speaks:
            sys.stderr.write("\nStopping after this round; press Ctrl-C again to stop at once.\n")


@contextmanager
def graceful_stop(speaks: bool = True) -> Iterator[StopRequest]:
    """Handles SIGINT and SIGTERM within the block and restores the former handlers after it.

    Outside the main thread, where Python allows no handlers, nothing is changed.
    """
    request = StopRequest(speaks)
    former: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        former = {s: signal.signal(s, request) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
