"""The same config and seed on one and two threads: the same bits where torch's kernels allow it."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedTrainer
from lightning_fed.aggregators import FedAdam
from lightning_fed.client_algorithms import FedProx
from lightning_fed.data import IID, FederatedDataModule
from lightning_fed.masks import SignAgreement
from tests.end_to_end.command import environment


def regression(side: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(side * side, 10))


def lenet() -> nn.Module:
    """LeNet-5 for images of 28 x 28."""
    first = nn.Sequential(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2))
    second = nn.Sequential(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(
        first, second, nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)
    )


class Images(LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def weights(threads: int, make: Callable[[], nn.Module], side: int = 28, engine: Any = "sequential") -> torch.Tensor:
    torch.manual_seed(0)
    model = Images(make())
    generator, before = torch.Generator().manual_seed(1), torch.get_num_threads()
    x = torch.randn(240, 1, side, side, generator=generator)
    y = torch.randint(0, 10, (240,), generator=generator)
    trainer = FederatedTrainer(
        accelerator="cpu", max_rounds=3, logger=False, enable_checkpointing=False, enable_progress_bar=False, seed=1,
        enable_model_summary=False, callbacks=[FedAdam(mask=SignAgreement()), FedProx(0.1)], engine=engine,
    )  # fmt: skip
    torch.set_num_threads(threads)
    try:
        data = FederatedDataModule(TensorDataset(x, y), IID(), num_clients=6, batch_size=20)
        trainer.fit(model, data)
    finally:
        torch.set_num_threads(before)
    return trainer.weights


def test_many_clients_at_once_are_the_same_on_one_and_two_threads() -> None:
    make = partial(regression, 8)
    assert torch.equal(weights(1, make, 8, "vectorized"), weights(2, make, 8, "vectorized"))


PROGRAM = """
import hashlib, sys
import torch
from functools import partial
from tests.parity.test_threads import lenet, regression, weights
torch.backends.mkldnn.enabled = False
for make in (partial(regression, 28), lenet):
    print(hashlib.sha256(weights(int(sys.argv[1]), make).numpy().tobytes()).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512") or not torch.backends.mkl.is_available(),
    reason="needs MKL and a processor with AVX2",
)
def test_clients_one_by_one_are_so_where_torch_is_asked_for_it() -> None:
    """As the documentation says: MKL_CBWR is read as the program starts, and oneDNN is left out."""
    found = []
    for threads in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, threads], capture_output=True, text=True, check=True,
            env={**environment(), "MKL_CBWR": "AVX2,STRICT"},
        )  # fmt: skip
        found.append(done.stdout.split()[-2:])
    assert found[0] == found[1]
