"""Corrupts a share of the clients on digits and compares the mean of their updates with robust means.

    OMP_NUM_THREADS=1 python benchmarks/robustness.py

Every method trains on the same split, cohorts and attacks; the figures are the final model's test accuracy. Nothing is
tuned: 1,797 images of digits, split evenly over 20 clients that all take part in every round.
"""

import argparse
import json
import logging
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule

from lightning_fed import FederatedCallback, FederatedError, FederatedTrainer, Update
from lightning_fed.aggregators import CoordinateMedian, FedAvg, GeometricMedian, Krum, MultiKrum, TrimmedMean
from lightning_fed.callbacks import ClipUpdates
from lightning_fed.core.seeding import Purpose, generator_for
from lightning_fed.data import IID, Digits
from lightning_fed.models import MLP, ImageClassifier

CLIENTS = 20
ATTACKS = ("none", "sign flip", "noise", "scaled")


class Corrupt(FederatedCallback):
    """Lets the clients with the lowest ids send something else than they trained.

    ``sign flip`` sends -5 δ, ``noise`` adds normal noise of a hundred times the update's root mean square to
    every coordinate, ``scaled`` sends 100 δ.

    Args:
        attack: One of ``ATTACKS``.
        count: Corrupted clients.
    """

    def __init__(self, attack: str, count: int) -> None:
        self.attack = attack
        self.count = count

    def on_client_end(self, trainer: FederatedTrainer, pl_module: LightningModule, update: Update) -> None:
        """Changes the update in place."""
        if update.client.id >= self.count:
            return
        delta = update.delta
        if self.attack == "sign flip":
            delta.mul_(-5)
        elif self.attack == "scaled":
            delta.mul_(100)
        elif self.attack == "noise":
            generator = generator_for(trainer.seed, Purpose.LOCAL, update.client.round, update.client.id)
            size = delta.norm() / len(delta) ** 0.5
            delta.add_(torch.randn(delta.shape, generator=generator).to(delta) * 100 * size)


# What a method is given, for a number of clients that it should bear.
METHODS: dict[str, Callable[[int], list[Callback]]] = {
    "FedAvg": lambda bad: [FedAvg()],
    "FedAvg, updates clipped to 1": lambda bad: [FedAvg(), ClipUpdates(1.0)],
    "coordinate median": lambda bad: [CoordinateMedian()],
    "trimmed mean, k = corrupted": lambda bad: [TrimmedMean(bad)],
    "Krum, f = corrupted": lambda bad: [Krum(bad)],
    "multi-Krum, f = corrupted, m = n - f": lambda bad: [MultiKrum(bad)],
    "geometric median": lambda bad: [GeometricMedian()],
}


def final_accuracy(method: Callable[[int], list[Callback]], attack: str, count: int, seed: int, rounds: int) -> float:
    """Trains once; returns the final model's test accuracy, not a number if the run has diverged."""
    data = Digits(num_clients=CLIENTS, partitioner=IID(), val_fraction=0.0)
    torch.manual_seed(seed)
    model = ImageClassifier(
        MLP(64, hidden=(64,), num_classes=10), optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)
    )
    # The attack comes before what the server does to updates, in the order of the list.
    callbacks = [Corrupt(attack, 0 if attack == "none" else count), *method(count)]
    trainer = FederatedTrainer(
        accelerator="cpu", seed=seed, max_rounds=rounds, callbacks=callbacks, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, default_root_dir="runs/robustness",
    )  # fmt: skip
    try:
        trainer.fit(model, data)
    except FederatedError as error:
        if "finite" not in str(error):
            raise
        return float("nan")
    (metrics,) = trainer.test(model, data, verbose=False)
    return metrics["test/acc"]


def cell(accuracies: list[float]) -> str:
    """Mean and standard deviation over seeds in percent, or how many runs diverged."""
    lost = sum(1 for value in accuracies if value != value)
    if lost:
        return f"diverged ({lost} of {len(accuracies)})"
    percent = [100 * value for value in accuracies]
    return f"{statistics.mean(percent):.1f} ± {statistics.stdev(percent) if len(percent) > 1 else 0.0:.1f}"


def compare(count: int, seeds: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Runs every method against every attack of ``count`` clients; prints a table row by row."""
    print(f"\n{count} of {CLIENTS} clients corrupted, {rounds} rounds, {seeds} seeds, test accuracy in %\n")
    print("| method | " + " | ".join(ATTACKS) + " |\n| --- |" + " --- |" * len(ATTACKS))
    results: dict[str, dict[str, list[float]]] = {}
    for name, method in METHODS.items():
        results[name] = {
            attack: [final_accuracy(method, attack, count, seed, rounds) for seed in range(seeds)] for attack in ATTACKS
        }
        print(f"| {name} | " + " | ".join(cell(values) for values in results[name].values()) + " |", flush=True)
    return results


def main() -> None:
    """Prints a table for each number of corrupted clients and writes the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corrupted", type=int, nargs="+", default=[4, 8], help="corrupted clients, of 20")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("runs/robustness/robustness.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    results: dict[str, Any] = {
        str(count): compare(count, arguments.seeds, arguments.rounds) for count in arguments.corrupted
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
