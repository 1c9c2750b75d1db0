"""Direct connections between processes of one machine; here threads stand for the processes."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed.distributed import connections as pipes
from lightning_fed.distributed.connections import Pipes, open_pipes

SIZE = 3


class Meeting:
    """Gives all threads what each one says; as on another machine, some may not see the first one's files."""

    def __init__(self, stranger: int | None = None) -> None:
        self.said: dict[int, Any] = {}
        self.barrier = threading.Barrier(SIZE, timeout=20)
        self.stranger = stranger

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.said[rank] = False if rank == self.stranger and value is True else value
        self.barrier.wait()
        everyone = [self.said[r] for r in range(SIZE)]
        self.barrier.wait()
        return everyone


def on_all(function: Any) -> list[Any]:
    with ThreadPoolExecutor(SIZE) as pool:
        return [future.result(timeout=20) for future in [pool.submit(function, rank) for rank in range(SIZE)]]


def connect(timeout_s: float = 20.0, meeting: Meeting | None = None) -> list[Pipes | None]:
    meeting = meeting or Meeting()
    return on_all(lambda rank: open_pipes(rank, SIZE, timeout_s, lambda value: meeting.exchange(rank, value)))


@pytest.fixture
def connected():
    opened = connect()
    assert all(isinstance(each, Pipes) for each in opened)
    yield opened
    for each in opened:
        each.close()


def test_all_hear_all_in_the_order_of_ranks(connected):
    contents = [pickle.dumps(list(range(n))) for n in (0, 10, 100_000)]  # the last one in many pieces
    for heard in on_all(lambda rank: connected[rank].gather(contents[rank])):
        assert heard == contents


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_sums_are_taken_in_the_order_of_ranks(connected, dtype):
    parts = (torch.randn(SIZE, 7, 1000, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    expected = (parts[0] + parts[1]) + parts[2]
    whole = [part.clone() for part in parts]
    on_all(lambda rank: connected[rank].reduce(whole[rank]))
    assert all(torch.equal(each, expected) for each in whole)


def test_maxima_are_those_of_numpy(connected):
    parts = torch.randint(-(2**62), 2**62, (SIZE, 50), generator=torch.Generator().manual_seed(0))
    whole = [part.clone() for part in parts]
    on_all(lambda rank: connected[rank].reduce(whole[rank], maximum=True))
    assert all(np.array_equal(each.numpy(), parts.numpy().max(0)) for each in whole)


@pytest.mark.parametrize("gone", range(SIZE))
def test_the_end_of_one_ends_the_others(connected, gone):
    def go_on(rank: int) -> str:
        if rank == gone:
            connected[rank].close()
            return "gone"
        try:
            connected[rank].gather(b"still here")
        except (EOFError, OSError):
            return "noticed"
        return "not noticed"

    assert on_all(go_on) == ["gone" if rank == gone else "noticed" for rank in range(SIZE)]


def test_who_waits_too_long_gives_up():
    opened = connect(timeout_s=0.3)
    with pytest.raises(OSError, match="temporarily unavailable"):
        opened[0].gather(b"is anybody there?")
    for each in opened:
        each.close()


def test_there_are_none_between_machines():
    assert connect(meeting=Meeting(stranger=2)) == [None] * SIZE


def test_there_are_none_where_the_system_has_no_such_sockets(monkeypatch):
    def refuse(**options: Any) -> None:
        raise OSError("AF_UNIX path too long")

    monkeypatch.setattr(pipes, "Listener", refuse)
    assert connect() == [None] * SIZE
