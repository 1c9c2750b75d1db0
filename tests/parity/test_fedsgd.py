"""FedSGD, one full-batch step of each client, is a gradient step on the cohort's data taken together."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedTrainer
from lightning_fed.data import FederatedDataModule, Partitioner
from lightning_fed.models import MLP, ImageClassifier


class Uneven(Partitioner):
    """Clients of 3, 9 and 18 samples."""

    def assign(self, targets: Any, num_samples: int, num_clients: int, generator: Any) -> Any:
        return torch.tensor([0] * 3 + [1] * 9 + [2] * 18).numpy()


def test_three_rounds_are_three_steps_of_large_batch_sgd(tmp_path: Path) -> None:
    x = torch.randn(30, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = (x.sum(1) > 0).long()
    torch.manual_seed(0)
    model = ImageClassifier(MLP(6, (5,), 2), num_classes=2, optimizer=lambda p: torch.optim.SGD(p, lr=0.3))
    torch.manual_seed(0)
    plain = MLP(6, (5,), 2).double()
    trainer = FederatedTrainer(
        accelerator="cpu", precision="64-true", max_rounds=3, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, default_root_dir=str(tmp_path),
    )  # fmt: skip
    trainer.fit(model, FederatedDataModule(TensorDataset(x, y), Uneven(), num_clients=3, batch_size=1000))
    for _ in range(3):
        gradients = torch.autograd.grad(nn.functional.cross_entropy(plain(x), y), list(plain.parameters()))
        with torch.no_grad():
            for p, g in zip(plain.parameters(), gradients, strict=True):
                p -= 0.3 * g
    ours: Tensor = nn.utils.parameters_to_vector(model.parameters())
    torch.testing.assert_close(ours, nn.utils.parameters_to_vector(plain.parameters()), rtol=1e-12, atol=1e-14)
