"""Times a client's batches and the partitioners.

    python -m benchmarks.data

Batches: those of the clients' source, and of a data loader for each client, against indexing the same tensors, repeats
interleaved; a figure is the median of the ratios. Partitioners: 1,000,000 samples over 100,000 clients, in seconds of
the process, which other work on the machine changes less than those of the clock.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from benchmarks.environment import machine, start_with_settings
from benchmarks.results import write_json
from lightning_fed.data import (
    IID,
    ByUser,
    DirichletBalanced,
    DirichletByClass,
    DirichletByClient,
    ExactClasses,
    FederatedDataModule,
    Partitioner,
    PowerLaw,
    QuantityDirichlet,
    Shards,
)

CLIENTS, SIZE = 100, 600
BASE = ("min_samples", "too_small")  # options that all partitioners have
WORK: dict[str, tuple[tuple[int, ...], int]] = {
    "images of 1x28x28, batches of 32": ((1, 28, 28), 32),
    "images of 3x32x32, batches of 32": ((3, 32, 32), 32),
    "64 features, batches of 10": ((64,), 10),
}
PARTITIONERS: list[Partitioner] = [
    IID(), Shards(2), ExactClasses(1), ExactClasses(2), DirichletByClient(1.0), DirichletByClass(0.5, min_samples=0),
    DirichletBalanced(0.5, min_samples=0), QuantityDirichlet(0.5), PowerLaw(1.0), ByUser(),
]  # fmt: skip


def plain(tensors: tuple[Tensor, ...], rows: Tensor, order: Tensor, batch_size: int) -> Iterator[list[Tensor]]:
    """The yardstick: index the tensors."""
    for chosen in rows[order].split(batch_size):
        yield [tensor[chosen] for tensor in tensors]


def select(tensors: tuple[Tensor, ...], rows: Tensor, order: Tensor, batch_size: int) -> Iterator[list[Tensor]]:
    """A stricter one: torch's fastest way to gather rows."""
    for chosen in rows.index_select(0, order).split(batch_size):
        yield [tensor.index_select(0, chosen) for tensor in tensors]


def seconds(batches: Callable[[int, Tensor], Iterator[Any]], orders: list[Tensor]) -> float:
    """Reads one epoch of every client."""
    started = time.perf_counter()
    for client, order in enumerate(orders):
        for _ in batches(client, order):
            pass
    return time.perf_counter() - started


def compare(shape: tuple[int, ...], batch_size: int, repeats: int) -> dict[str, float]:
    """Runs interleaved repeats of all ways; returns seconds for a batch and ratios to both yardsticks."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(CLIENTS * SIZE, *shape, generator=generator), torch.arange(CLIENTS * SIZE) % 10)
    module = FederatedDataModule(data, IID(), CLIENTS, batch_size=batch_size, split_seed=0)
    source, index = module.train_source(), torch.from_numpy(module.split.index).split(SIZE)
    subsets = [Subset(data, rows.tolist()) for rows in index]
    orders = [torch.randperm(SIZE, generator=generator) for _ in range(CLIENTS)]
    ways: dict[str, Callable[[int, Tensor], Iterator[Any]]] = {
        "plain": lambda client, order: plain(data.tensors, index[client], order, batch_size),
        "select": lambda client, order: select(data.tensors, index[client], order, batch_size),
        "source": lambda client, order: source.batches(client, order, 0),
        "loader": lambda client, order: iter(DataLoader(subsets[client], batch_size, sampler=order.tolist())),
    }
    # A data loader for every client takes long: a tenth of them are enough.
    taken = {name: orders[: CLIENTS // 10] if name == "loader" else orders for name in ways}
    batches = -(-SIZE // batch_size)
    runs = [{name: seconds(way, taken[name]) / len(taken[name]) / batches for name, way in ways.items()}
            for _ in range(repeats + 1)][1:]  # fmt: skip
    figures = {f"{name}_s": statistics.median(run[name] for run in runs) for name in ways}
    for yardstick in ("plain", "select"):
        for name in ("source", "loader"):
            figures[f"{name}/{yardstick}"] = statistics.median(run[name] / run[yardstick] for run in runs)
    return figures


def partition(partitioner: Partitioner, num_samples: int, num_clients: int, repeats: int) -> float:
    """Returns the median seconds of a split of samples of 10 classes, or of as many users as clients."""
    generator = np.random.default_rng(0)
    users = generator.permutation(np.arange(num_samples) % num_clients)
    values = users if partitioner.reads == "users" else generator.integers(0, 10, num_samples)
    times = []
    for seed in range(repeats):
        started = time.process_time()
        partitioner(values, num_samples, num_clients, seed)
        times.append(time.process_time() - started)
    return statistics.median(times)


def main() -> None:
    """Prints both tables and writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--partition-repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/data.json"))
    arguments = parser.parse_args()
    found, batches, splits = machine("lightning_fed"), {}, {}
    for name, (shape, batch_size) in WORK.items():
        batches[name] = figures = compare(shape, batch_size, arguments.repeats)
        print(
            f"{name}: tensor[rows] {1e6 * figures['plain_s']:.1f} µs a batch, index_select "
            f"{1e6 * figures['select_s']:.1f} µs; source {figures['source/plain']:.2f} x and "
            f"{figures['source/select']:.2f} x, data loader {figures['loader/plain']:.1f} x and "
            f"{figures['loader/select']:.1f} x",
            flush=True,
        )
    for partitioner in PARTITIONERS:
        options = ", ".join(f"{key}={value}" for key, value in vars(partitioner).items() if key not in BASE)
        name = f"{type(partitioner).__name__}({options})"
        splits[name] = partition(partitioner, 1_000_000, 100_000, arguments.partition_repeats)
        print(f"{name}: {splits[name]:.2f} s", flush=True)
    write_json(arguments.output, {"machine": found, "batches": batches, "partitioners": splits})


if __name__ == "__main__":
    start_with_settings("benchmarks.data")
    main()
