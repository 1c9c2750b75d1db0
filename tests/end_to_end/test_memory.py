"""Memory of a round does not grow with the cohort, for methods that stream."""

import subprocess
import sys

import pytest

from tests.end_to_end.command import REPOSITORY, environment

PROGRAM = """
import sys
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import TensorDataset
from benchmarks.environment import peak_memory
from lightning_fed import FederatedTrainer
from lightning_fed.aggregators import FedYogi
from lightning_fed.data import IID, FederatedDataModule
from lightning_fed.masks import MagnitudeAgreement

size, clients = int(sys.argv[1]), int(sys.argv[2])

class Long(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
    def training_step(self, batch, batch_idx):
        return (self.weight * batch[0].mean()).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def fit(count, rounds):
    data = FederatedDataModule(TensorDataset(torch.randn(count, 1)), IID(), num_clients=count, batch_size=1)
    FederatedTrainer(
        accelerator="cpu", max_rounds=rounds, callbacks=[FedYogi(mask=MagnitudeAgreement())], logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    ).fit(Long(), data)

fit(clients, 1)
print(peak_memory())
"""


def _peak_bytes(size: int, clients: int) -> int:
    command = [sys.executable, "-c", PROGRAM, str(size), str(clients)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("size", "clients"), [(2_000_000, 80), (10_000_000, 1_000)])
def test_peak_memory_of_a_large_cohort_is_that_of_a_small_one(size: int, clients: int) -> None:
    grown = _peak_bytes(size, clients) - _peak_bytes(size, 10)
    assert grown < 10 * 4 * size, f"{grown / (4 * size):.1f} vectors of d numbers more for {clients} clients"
