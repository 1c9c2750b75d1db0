"""The other end of a race: starts the sides of a row in threads or processes, and gives them their turns."""

import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from benchmarks.race.turns import ContestantFailed, Turns

__all__ = ["Handle", "ProcessHandle", "ThreadHandle", "race"]

_START_TIMEOUT, _ROUND_TIMEOUT = 300.0, 1800.0


class Handle(ABC):
    """Listens for a side and tells it when to train.

    Args:
        name: What to call it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._folder = tempfile.mkdtemp(prefix="race-")
        self.address = f"{self._folder}/socket"
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.address)
        self._server.listen(1)
        self._connection: socket.socket | None = None

    @abstractmethod
    def is_alive(self) -> bool:
        """Says whether the side can still be expected to answer."""

    def last_words(self) -> str:
        """Returns the end of what the side has written, if that is known."""
        return ""

    def wait_until_ready(self) -> None:
        """Waits until the side stands before its first round: two threads that set up at once share random streams.

        Raises:
            ContestantFailed: If it failed or ended.
        """
        if self._connection is None:
            self._connection = self._accept()
            self._connection.settimeout(_ROUND_TIMEOUT)
            self._lines = self._connection.makefile("r")

    def round(self) -> float:
        """Gives the side its turn; returns the seconds of its round.

        Raises:
            ContestantFailed: If it failed or ended.
        """
        self.wait_until_ready()
        assert self._connection is not None
        line = ""
        with suppress(BrokenPipeError):  # one that failed before its turn has left word
            self._connection.sendall(b"go\n")
        with suppress(OSError):
            line = self._lines.readline()
        message = json.loads(line) if line else {"error": f"it ended or took too long{self.last_words()}"}
        if "error" in message:
            raise ContestantFailed(f"{self.name}: {message['error']}")
        return float(message["seconds"])

    def _accept(self) -> socket.socket:
        self._server.settimeout(0.2)
        until = time.monotonic() + _START_TIMEOUT
        while time.monotonic() < until:
            try:
                return self._server.accept()[0]
            except TimeoutError:
                if not self.is_alive():
                    break
        raise ContestantFailed(f"{self.name}: it did not start{self.last_words()}")

    def close(self) -> None:
        """Ends the side, wherever it is."""
        for end in (self._connection, self._server):
            if end is not None:
                with suppress(OSError):  # not only closed: the file made of a socket keeps it open
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class ThreadHandle(Handle):
    """A side in a thread of this process; it waits while the other one trains.

    Args:
        name: What to call it.
        side: Trains by turns.
        device: The device that it trains on.
    """

    def __init__(self, name: str, side: Callable[[Turns], None], device: str = "cpu") -> None:
        super().__init__(name)
        self._thread = threading.Thread(target=self._train, args=(side, Turns(self.address, device)), daemon=True)
        self._thread.start()

    @staticmethod
    def _train(side: Callable[[Turns], None], turns: Turns) -> None:
        torch.set_num_threads(1)  # each thread has its own number
        try:
            side(turns)
        except Exception as error:
            turns.fail(error)

    def is_alive(self) -> bool:
        """Says whether the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread, which leaves its training as it finds the other end gone."""
        super().close()
        self._thread.join(timeout=60)


class ProcessHandle(Handle):
    """A side in a process, or several, of its own.

    Args:
        name: What to call it.
        command: The command for an address.
        log: File for what it writes.
    """

    def __init__(self, name: str, command: Callable[[str], list[str]], log: Path) -> None:
        super().__init__(name)
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            # In a session of its own, so that what it starts can be ended with it.
            self._process = subprocess.Popen(
                command(self.address), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    def is_alive(self) -> bool:
        """Says whether the process runs."""
        return self._process.poll() is None

    def last_words(self) -> str:
        """Returns the last line of the log."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f": {lines[-1]} (see {self._log})" if lines else ""

    def close(self) -> None:
        """Waits a moment for the end, then ends the process with all that it has started."""
        super().close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                return
            time.sleep(1.0)


def race(first: Handle, second: Handle, repeats: int, rounds: int) -> list[tuple[float, float]]:
    """Lets two sides train alternately: a repeat is some rounds of one, then as many of the other.

    One repeat before the others warms both up; the side that begins changes from repeat to repeat.

    Args:
        first: One side.
        second: The other.
        repeats: Repeats that count.
        rounds: Rounds in a repeat.

    Returns:
        Median seconds for a round of the first and of the second side, for each repeat.

    Raises:
        ContestantFailed: If a side could not go on.
    """
    pairs = []
    for repeat in range(repeats + 1):
        order = (first, second) if repeat % 2 == 0 else (second, first)
        seconds = {handle: statistics.median(handle.round() for _ in range(rounds)) for handle in order}
        pairs.append((seconds[first], seconds[second]))
    return pairs[1:]
