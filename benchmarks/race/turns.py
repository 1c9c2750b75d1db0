"""A side's end of a race: it stops before every round until it is told to go on, and then tells how long it took.

So two sides of a row, each one long training, run their rounds alternately, on a machine that is busy or slow for both.
"""

import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

__all__ = ["ContestantFailed", "Turns"]


class ContestantFailed(Exception):
    """One side of a row could not go on."""


class Turns:
    """Waits for this side's turn before each round and tells the seconds after it.

    Args:
        address: Socket where the other end listens.
        device: The device whose work belongs to a round.

    Attributes:
        excluded: Seconds of the current round that shall not count.
    """

    def __init__(self, address: str, device: str = "cpu") -> None:
        self.address, self.device = address, device
        self.excluded = 0.0
        self._socket: socket.socket | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the connection behind: the process that trains may be another than the one that was started."""
        return {"address": self.address, "device": self.device, "excluded": 0.0, "_socket": None}

    def begin(self, barrier: Callable[[], Any] | None = None) -> None:
        """Waits for this side's turn and starts the clock.

        Args:
            barrier: Lets the processes that wait for this one go on.

        Raises:
            ContestantFailed: If the other end is gone.
        """
        self._connect()
        if not self._lines.readline():
            raise ContestantFailed("The race is over.")
        if barrier is not None:
            barrier()
        self.excluded = 0.0
        self._synchronize()
        self.started = time.perf_counter()

    def end(self) -> None:
        """Stops the clock and tells the seconds, without those that are excluded."""
        self._synchronize()
        self._tell(seconds=time.perf_counter() - self.started - self.excluded)

    def fail(self, error: BaseException) -> None:
        """Tells that this side cannot go on."""
        with suppress(OSError):  # the other end may be gone
            self._connect()
            self._tell(error=f"{type(error).__name__}: {' '.join(str(error).split())}")

    def _connect(self) -> None:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(self.address)
            self._lines = self._socket.makefile("r")

    def _synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def _tell(self, **message: Any) -> None:
        assert self._socket is not None
        self._socket.sendall(json.dumps(message).encode() + b"\n")
