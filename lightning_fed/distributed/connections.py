"""How the processes of one machine tell each other something: from one thread to the other, with none in between."""

from __future__ import annotations

import os
import pickle
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch
from torch import Tensor

__all__ = ["Pipes", "open_pipes"]


class Pipes:
    """A star of connections: the first process hears the others, in the order of ranks, and answers all of them.

    gloo's threads must be woken on cores that train, which takes milliseconds: as long as a round of a small model.

    Args:
        connections: Those of the first process to each other one, in the order of ranks; the one of each other process
            to the first one.
        is_first: Whether this is the first process.
    """

    def __init__(self, connections: list[Connection[Any, Any]], is_first: bool) -> None:
        self._connections, self._is_first = connections, is_first

    def gather(self, content: bytes) -> list[bytes]:
        """Returns what each process says, in the order of ranks.

        Raises:
            EOFError: If a process has ended.
            OSError: Likewise, or if one has not answered in time.
        """
        with self._closing():
            if not self._is_first:
                self._connections[0].send_bytes(content)
                said: list[bytes] = pickle.loads(self._connections[0].recv_bytes())
                return said
            everyone = [content, *(connection.recv_bytes() for connection in self._connections)]
            answer = pickle.dumps(everyone, protocol=5)
            for connection in self._connections:
                connection.send_bytes(answer)
            return everyone

    def reduce(self, tensor: Tensor, maximum: bool = False) -> None:
        """Adds a tensor over the processes in the order of ranks, or takes the maximum, in place.

        Args:
            tensor: A contiguous tensor on the CPU, alike on all processes.
            maximum: Whether to take the maximum.

        Raises:
            EOFError, OSError: See ``gather``.
        """
        content = _bytes(tensor)
        with self._closing():
            if not self._is_first:
                self._connections[0].send_bytes(content)
                self._connections[0].recv_bytes_into(content)
                return
            other = torch.empty_like(tensor)
            received = _bytes(other)
            for connection in self._connections:
                connection.recv_bytes_into(received)
                if maximum:
                    torch.maximum(tensor, other, out=tensor)
                else:
                    tensor.add_(other)
            for connection in self._connections:
                connection.send_bytes(content)

    def close(self) -> None:
        """Ends all connections, which those who wait for this process notice."""
        for connection in self._connections:
            with suppress(OSError):
                connection.close()

    @contextmanager
    def _closing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # half a message may be under way
            self.close()
            raise


def _bytes(tensor: Tensor) -> Any:
    return tensor.view(-1).view(torch.uint8).numpy()  # of the same memory


def open_pipes(rank: int, size: int, timeout_s: float, exchange: Callable[[Any], list[Any]]) -> Pipes | None:
    """Connects the processes if all are of one machine; None if they are not.

    Args:
        rank: Index of this process.
        size: Number of processes.
        timeout_s: How long to wait for an answer.
        exchange: Gives every process what each one says, by other ways.
    """
    listener = _listener(size) if rank == 0 else None
    try:
        address = exchange(listener.address if listener is not None else "")[0]
        if not all(exchange(os.path.exists(address))):  # on another machine, or in another container
            return None
        connections = _accept(listener, size - 1) if listener is not None else [Client(address)]
    finally:
        if listener is not None:
            listener.close()
    if rank > 0:
        connections[0].send(rank)
    for connection in connections:
        _limit(connection, timeout_s)
    return Pipes(connections, rank == 0)


def _listener(size: int) -> Listener | None:
    """Listens in a folder that no other user can open; None where there is no such thing."""
    with suppress(OSError, ValueError):  # the path is too long, or the system knows no such sockets
        return Listener(family="AF_UNIX", backlog=size)
    return None


def _accept(listener: Listener, count: int) -> list[Connection[Any, Any]]:
    """Returns the connections of the others, in the order of ranks."""
    accepted = [listener.accept() for _ in range(count)]
    return [connection for _, connection in sorted(((c.recv(), c) for c in accepted), key=lambda pair: pair[0])]


def _limit(connection: Connection[Any, Any], seconds: float) -> None:
    """Lets a connection fail that waits for longer."""
    with socket.socket(fileno=os.dup(connection.fileno())) as twin:
        whole = int(seconds)
        twin.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole, int(1e6 * (seconds - whole))))
