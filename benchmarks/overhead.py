"""Times a round of the framework against the loop written by hand, in one process and one run.

    OMP_NUM_THREADS=1 python benchmarks/overhead.py

Repeats of both are interleaved, so that a busy machine slows both; the figure is the median of the ratios.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from plain import PlainFedAvg
from torch.utils.data import TensorDataset

from lightning_fed import FederatedCallback, FederatedTrainer
from lightning_fed.data import IID, FederatedDataModule
from lightning_fed.models import ImageClassifier, LeNet, LogisticRegression

WORK: dict[str, dict[str, Any]] = {
    "A: LeNet, 100 clients of 600, 10 per round, batch 32": {
        "backbone": LeNet, "shape": (1, 28, 28), "clients": 100, "size": 600, "per_round": 10, "batch": 32,
        "lr": 0.01, "momentum": 0.9, "rounds": 3,
    },
    "B: logistic regression, 1,000 clients of 60, 100 per round, batch 20": {
        "backbone": lambda: LogisticRegression(784), "shape": (1, 28, 28), "clients": 1000, "size": 60,
        "per_round": 100, "batch": 20, "lr": 0.01, "momentum": 0.9, "rounds": 20,
    },
}  # fmt: skip


class RoundTimes(FederatedCallback):
    """Collects the seconds of each round, from the draw of the cohort to the end of the server step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Starts the clock."""
        self.started = time.perf_counter()

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Stops the clock."""
        self.seconds.append(time.perf_counter() - self.started)


def plain_rounds(work: dict[str, Any], images: torch.Tensor, labels: torch.Tensor) -> Callable[[], list[float]]:
    """Prepares the loop written by hand; each call runs one repeat of it."""
    clients = list(torch.arange(len(images)).split(work["size"]))
    torch.manual_seed(0)
    loop = PlainFedAvg(
        work["backbone"](), images, labels, clients, work["per_round"], work["batch"], work["lr"], work["momentum"]
    )
    return lambda: [loop.round(number) for number in range(work["rounds"])]


def framework_rounds(work: dict[str, Any], images: torch.Tensor, labels: torch.Tensor) -> Callable[[], list[float]]:
    """Prepares the framework; each call runs one repeat of it."""
    data = FederatedDataModule(TensorDataset(images, labels), IID(), work["clients"], batch_size=work["batch"])
    torch.manual_seed(0)
    model = ImageClassifier(
        work["backbone"](), optimizer=lambda p: torch.optim.SGD(p, lr=work["lr"], momentum=work["momentum"])
    )

    def repeat() -> list[float]:
        times = RoundTimes()
        trainer = FederatedTrainer(
            accelerator="cpu", max_rounds=work["rounds"], clients_per_round=work["per_round"], callbacks=[times],
            logger=False, enable_checkpointing=False, enable_progress_bar=False, default_root_dir="runs/bench",
        )  # fmt: skip
        trainer.fit(model, data)
        return times.seconds

    return repeat


def compare(work: dict[str, Any], repeats: int) -> dict[str, float]:
    """Runs interleaved repeats of both and returns seconds per round and their ratio."""
    generator = torch.Generator().manual_seed(0)
    count = work["clients"] * work["size"]
    images = torch.randn(count, *work["shape"], generator=generator)
    labels = torch.randint(10, (count,), generator=generator)
    plain, framework = plain_rounds(work, images, labels), framework_rounds(work, images, labels)
    plain(), framework()
    pairs = [(statistics.median(plain()), statistics.median(framework())) for _ in range(repeats)]
    ratios = sorted(ours / yardstick for yardstick, ours in pairs)
    return {
        "plain_s": statistics.median(yardstick for yardstick, _ in pairs),
        "framework_s": statistics.median(ours for _, ours in pairs),
        "ratio": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
    }


def main() -> None:
    """Prints a table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/overhead.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name, work in WORK.items():
        results[name] = figures = compare(work, arguments.repeats)
        print(
            f"{name}\n  plain {1e3 * figures['plain_s']:.1f} ms, framework {1e3 * figures['framework_s']:.1f} ms per "
            f"round: {figures['ratio']:.3f} x (from {figures['ratio_min']:.3f} to {figures['ratio_max']:.3f} over "
            f"{arguments.repeats} repeats)",
            flush=True,
        )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    versions = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    arguments.output.write_text(json.dumps({"versions": versions, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
