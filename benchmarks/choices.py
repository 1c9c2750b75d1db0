"""What `auto` chooses by: where many clients at once are quicker, and where convolutions are with the channels last.

    python -m benchmarks.choices engines
    python -m benchmarks.choices layers
    python -m benchmarks.choices samples
    python -m benchmarks.choices layouts

prints one table each: the processor time of a round with the option over that without it, the median of pairs of runs
by turns, on one thread.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedCallback, FederatedTrainer
from lightning_fed.data import ClientRotation, CropFlip, FederatedDataModule
from lightning_fed.data.partitioners import IID
from lightning_fed.models import CNN, ImageClassifier, LeNet, ResNet18

__all__ = ["LAYERS", "LAYOUTS", "SAMPLES", "ratio"]

_CLASSES, _STEPS, _ROUNDS = 10, 3, 6


def perceptron(hidden: int) -> nn.Module:
    """Makes a perceptron on 784 inputs, logistic regression without hidden units."""
    if not hidden:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, _CLASSES))
    return nn.Sequential(nn.Flatten(), nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, _CLASSES))


class Recurrent(nn.Module):
    """Reads an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(28, 64, num_layers=2, batch_first=True), nn.Linear(64, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (b, 1, 28, 28) to (b, 10)."""
        return self.out(self.lstm(x[:, 0])[0][:, -1])


class Attending(nn.Module):
    """Attends to the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(28, 4, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(28 * 28, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (b, 1, 28, 28) to (b, 10)."""
        return self.out(self.layer(x[:, 0]).flatten(1))


def _normed(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), norm, nn.ReLU(), nn.Linear(32, _CLASSES))


def _convolved(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.LazyLinear(_CLASSES))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "fully connected": lambda: perceptron(32),
    "with LayerNorm": lambda: _normed(nn.LayerNorm(32)),
    "with BatchNorm1d": lambda: _normed(nn.BatchNorm1d(32)),
    "with GroupNorm": lambda: _normed(nn.GroupNorm(4, 32)),
    "a transformer encoder layer": Attending,
    "two LSTM layers": Recurrent,
    "LeNet": LeNet,
}
LAYOUTS: dict[str, Callable[[], nn.Module]] = {
    "LeNet": LeNet,
    "CNN": CNN,
    "ResNet18": partial(ResNet18, in_channels=1),
    "one convolution": lambda: _convolved(nn.Conv2d(1, 16, 3)),
    "two, BatchNorm2d": lambda: _convolved(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3)),
    "two, GroupNorm": lambda: _convolved(nn.Conv2d(1, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 32, 3)),
    "grouped": lambda: _convolved(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, groups=4)),
    "depthwise": lambda: _convolved(nn.Conv2d(1, 16, 3), nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 32, 1)),
    "dilated": lambda: _convolved(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, dilation=2)),
    "patches": lambda: _convolved(nn.Conv2d(1, 32, 4, stride=4)),
}


# What is done to samples before a step: options of the trainer, and of the data.
SAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as they are": ({}, {}),
    "CropFlip": ({}, {"augmentation": CropFlip()}),
    "ClientRotation": ({}, {"skew": ClientRotation()}),
    "double precision": ({"precision": "64-true"}, {}),
    "bf16-true": ({"precision": "bf16-true"}, {}),
    "bf16-mixed": ({"precision": "bf16-mixed"}, {}),
}


class RoundClock(FederatedCallback):
    """Takes the processor time of each round's training, in seconds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_round_start(self, trainer: Any, pl_module: Any, cohort: Any) -> None:
        """Starts the clock."""
        self._started = time.process_time()

    def on_round_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        """Stops it."""
        self.seconds.append(time.process_time() - self._started)


def seconds_of_a_round(
    net: Callable[[], nn.Module], clients: int, batch_size: int, options: Mapping[str, Any], of_data: Mapping[str, Any]
) -> float:
    """Trains four rounds of all clients, three steps each, and returns the least time of the last three in seconds."""
    torch.manual_seed(0)
    model = net()
    model(torch.zeros(2, 1, 28, 28))  # lazy layers
    rows = clients * batch_size * _STEPS
    samples = TensorDataset(torch.rand(rows, 1, 28, 28), torch.randint(_CLASSES, (rows,)))
    clock = RoundClock()
    with TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            "cpu", default_root_dir=str(Path(folder)), max_rounds=_ROUNDS, seed=0, callbacks=[clock], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
        )  # fmt: skip
        module = ImageClassifier(model, optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9))
        trainer.fit(module, FederatedDataModule(samples, IID(), clients, batch_size=batch_size, **of_data))
    return min(clock.seconds[1:])


def ratio(
    net: Callable[[], nn.Module],
    clients: int,
    batch_size: int,
    pairs: int,
    one: dict[str, Any],
    other: dict[str, Any],
    of_data: Mapping[str, Any] = MappingProxyType({}),
) -> float:
    """Returns the median over pairs of runs of the time of a round with some options over that with others."""
    found = []
    for _ in range(pairs):
        first, second = (seconds_of_a_round(net, clients, batch_size, options, of_data) for options in (one, other))
        found.append(first / second)
    return statistics.median(found)


_ENGINES = ({"engine": "vectorized"}, {"engine": "sequential"})
_FORMATS = tuple({"engine": "sequential", "memory_format": name} for name in ("channels_last", "preserve"))


def _of_perceptron(units: dict[int, int], clients: int, pairs: int, weights: int) -> float:
    return ratio(partial(perceptron, units[weights]), clients, 20, pairs, *_ENGINES)


def _of_samples(name: str, pairs: int, clients: int) -> float:
    options, of_data = SAMPLES[name]
    one, other = ({**engine, **options} for engine in _ENGINES)
    return ratio(partial(perceptron, 32), clients, 20, pairs, one, other, of_data)


def _print_table(head: list[Any], rows: Mapping[Any, Callable[[Any], float]]) -> None:
    print("| " + " | ".join(map(str, head)) + " |")
    print("| " + " | ".join("---" for _ in head) + " |")
    for name, cell in rows.items():
        print(f"| {name} | " + " | ".join(f"{cell(column):.2f}" for column in head[1:]) + " |", flush=True)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["engines", "layers", "samples", "layouts"])
    parser.add_argument("--pairs", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pairs = arguments.pairs
    if arguments.table == "engines":
        units = {(784 + 11) * hidden + 10 if hidden else 7_850: hidden for hidden in (0, 32, 128, 256, 512)}
        _print_table(["clients", *units], {n: partial(_of_perceptron, units, n, pairs) for n in (2, 5, 8, 10, 30, 100)})
    elif arguments.table == "layers":
        _print_table(["layers, by clients", 10, 30], {
            name: lambda n, net=net: ratio(net, n, 20, pairs, *_ENGINES) for name, net in LAYERS.items()
        })  # fmt: skip
    elif arguments.table == "samples":
        cells = {name: partial(_of_samples, name, pairs) for name in SAMPLES}
        _print_table(["samples, by clients", 10, 30, 100], cells)
    else:
        _print_table(["network, by batch size", 10, 32], {
            name: lambda size, net=net: ratio(net, 3, size, pairs, *_FORMATS) for name, net in LAYOUTS.items()
        })  # fmt: skip


if __name__ == "__main__":
    main()
