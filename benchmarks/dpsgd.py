"""CPU time of clients that train by DP-SGD against clients that do not: ``python -m benchmarks.dpsgd``, a minute.

Prints the ratio of the medians over rounds, for batches of B samples on average and at most M, on one thread.
"""

import statistics
import time

import torch
from torch.utils.data import TensorDataset

from lightning_fed import FederatedTrainer
from lightning_fed.client_algorithms import DPSGD
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.data import FederatedDataModule
from lightning_fed.data.partitioners import IID
from lightning_fed.models import MLP, ImageClassifier, LeNet

CLIENTS, SAMPLES, ROUNDS = 2, 500, 7


class Times(FederatedCallback):
    """Keeps how long the clients of each round have trained."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_round_start(self, trainer, pl_module, cohort) -> None:
        self._started = time.process_time()

    def on_before_server_step(self, trainer, pl_module, update) -> None:
        self.seconds.append(time.process_time() - self._started)


def round_time(backbone: str, batch: int, *algorithms: DPSGD) -> float:
    """Returns the median time of the clients of a round, in seconds."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(CLIENTS * SAMPLES, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (len(inputs),), generator=generator)
    data = FederatedDataModule(TensorDataset(inputs, labels), IID(), num_clients=CLIENTS, batch_size=batch)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = FederatedTrainer(
        accelerator="cpu", callbacks=[*algorithms, times := Times()], max_rounds=ROUNDS, engine="sequential", **quiet
    )
    trainer.fit(ImageClassifier(LeNet() if backbone == "LeNet" else MLP(28 * 28)), data)
    return statistics.median(times.seconds[1:])


def main() -> None:
    """Prints a line for each model and batch."""
    torch.set_num_threads(1)
    for backbone in ("LeNet", "MLP"):
        for batch in (10, 50):
            plain = round_time(backbone, batch)
            for most in (batch, None):
                algorithm = DPSGD(clip=1.0, noise=0.2, max_batch=most)  # for which ε takes no time
                ratio = round_time(backbone, batch, algorithm) / plain
                print(f"{backbone}, B {batch}, M {algorithm.share[1]}: {ratio:.1f}", flush=True)


if __name__ == "__main__":
    main()
