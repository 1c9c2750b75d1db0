"""What it costs two processes of one machine, after some milliseconds of work, to tell each other something.

    python -m benchmarks.exchange

compares gloo with direct connections (`lightning_fed.distributed.connections`). The cost is the time of work and
exchange, less the work.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing

from lightning_fed.distributed.connections import Pipes, open_pipes

__all__ = ["main", "mean_cost"]


def mean_cost(exchange: Callable[[], Any], work_s: float, repeats: int) -> float:
    """Returns the mean seconds of an exchange that comes after work."""
    for _ in range(20):
        exchange()
    started = time.perf_counter()
    for _ in range(repeats):
        until = time.perf_counter() + work_s
        while time.perf_counter() < until:
            pass
        exchange()
    return (time.perf_counter() - started) / repeats - work_s


def _exchanges(pipes: Pipes) -> dict[str, Callable[[], Any]]:
    vector, packet = torch.zeros(7850), torch.zeros(1 << 14, dtype=torch.uint8)
    everyone, content = [torch.empty_like(packet) for _ in range(2)], bytes(1 << 14)
    return {
        "all_reduce of 7,850 floats, gloo": lambda: dist.all_reduce(vector),
        "all_reduce of 7,850 floats, direct": lambda: pipes.reduce(vector),
        "all_gather of 16 KiB, gloo": lambda: dist.all_gather(everyone, packet),
        "all_gather of 16 KiB, direct": lambda: pipes.gather(content),
    }


def _play(rank: int, meeting: str, work_s: float, repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)

    def exchange(value: Any) -> list[Any]:
        everyone = [None, None]
        dist.all_gather_object(everyone, value)
        return everyone

    pipes = open_pipes(rank, 2, 60.0, exchange)
    assert pipes is not None, "two processes of one machine"
    for name, function in _exchanges(pipes).items():
        seconds = mean_cost(function, work_s, repeats)
        if rank == 0:
            print(f"{name}: {1e6 * seconds:.0f} µs", flush=True)
    pipes.close()
    dist.destroy_process_group()


def main() -> None:
    """Prints the cost of each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-ms", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=200)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "meeting")
        multiprocessing.spawn(_play, args=(meeting, given.work_ms / 1e3, given.repeats), nprocs=2)


if __name__ == "__main__":
    main()
