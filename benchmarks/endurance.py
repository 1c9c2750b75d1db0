"""Whether a long run grows: memory, open files, threads and time over ten thousand tiny rounds.

    python -m benchmarks.endurance --write-docs

trains a small model with client state, a validation and a row in every round, and a checkpoint in every tenth.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.environment import resident_memory, start_with_settings
from benchmarks.figures import IMAGES, ROOT
from lightning_fed import FederatedTrainer
from lightning_fed.callbacks import FederatedCheckpoint
from lightning_fed.client_algorithms import SCAFFOLD
from lightning_fed.data import IID, FederatedDataModule

__all__ = ["Watch", "grown", "run"]

ROUNDS, EVERY = 10_000, 50
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- endurance: begin -->", "<!-- endurance: end -->"


class Small(LightningModule):
    """Logistic regression."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Returns the loss."""
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Logs the loss."""
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Watch(Callback):
    """Notes, every few rounds, what the process holds and the processor time of a round since the last note.

    Attributes:
        found: A row for each note: round, MiB of memory, open files, threads, ms of processor time of a round.
    """

    def __init__(self, every: int) -> None:
        self.every, self.since = every, time.process_time()
        self.found: list[tuple[float, ...]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Takes a note."""
        if trainer.round % self.every:
            return
        now = time.process_time()
        threads, files = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
        held = resident_memory() / 2**20
        self.found.append((trainer.round, held, files, threads, 1000 * (now - self.since) / self.every))
        self.since = time.process_time()


def run(rounds: int, every: int) -> list[tuple[float, ...]]:
    """Trains so many rounds; returns what a ``Watch`` has found."""
    torch.manual_seed(0)
    x, watch = torch.randn(160, 10), Watch(every)
    data = TensorDataset(x, x[:, :3].argmax(1))
    with tempfile.TemporaryDirectory() as folder:
        FederatedTrainer(
            accelerator="cpu", max_rounds=rounds, clients_per_round=2, logger=[],
            callbacks=[SCAFFOLD(), FederatedCheckpoint(every_n_rounds=10), watch],
            default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False,
        ).fit(Small(), FederatedDataModule(data, IID(), num_clients=8, batch_size=20, val_dataset=data))  # fmt: skip
    return watch.found


def grown(values: Sequence[float]) -> tuple[float, float]:
    """Returns the medians of the second and the last tenth: what comes before belongs to the start."""
    tenth = max(len(values) // 10, 1)
    return median(values[tenth : 2 * tenth]), median(values[-tenth:])


def table(found: list[tuple[float, ...]]) -> str:
    """Writes the figures as a Markdown table."""
    names = ("memory, MiB", "open files", "threads", "processor time of a round, ms")
    lines = ["| | rounds of the second tenth, median | of the last tenth |", "| --- | --- | --- |"]
    for name, values in zip(names, list(zip(*found, strict=True))[1:], strict=True):
        lines.append(f"| {name} | " + " | ".join(f"{value:.4g}" for value in grown(values)) + " |")
    return "\n".join(lines)


def plot(found: list[tuple[float, ...]], path: Path) -> None:
    """Draws memory, open files and time over rounds."""
    import matplotlib.pyplot as plt

    from docs.pictures import save

    rows = np.array(found)
    figure, axes = plt.subplots(1, 3, figsize=(10, 2.6), layout="constrained")
    for axis, column, title in zip(
        axes, (1, 2, 4), ("memory, MiB", "open files", "processor time of a round, ms"), strict=True
    ):
        axis.plot(rows[:, 0], rows[:, column], color="#4878a8", linewidth=1)
        axis.set(title=title, xlabel="round", ylim=(0, 1.3 * rows[:, column].max()))
    save(figure, path, dpi=120)


def main() -> None:
    """Runs and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--every", type=int, default=EVERY)
    parser.add_argument("--write-docs", action="store_true", help="write table and figure into docs/reliability.md")
    given = parser.parse_args()
    found = run(given.rounds, given.every)
    print(table(found))
    if given.write_docs:
        plot(found, IMAGES / "endurance.png")
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    start_with_settings("benchmarks.endurance")
    main()
