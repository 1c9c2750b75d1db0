"""Two processes, of which the second computes without this processor's vector instructions: FOLDER gets their results.

As on two machines of other years.
"""

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from lightning_fed import FederatedTrainer
from lightning_fed.aggregators import FedAvg, FedAvgM, FedDynServer, FedYogi, GeometricMedian, ServerOptimizer
from lightning_fed.client_algorithms import SCAFFOLD, FedDyn
from lightning_fed.data import FederatedDataModule
from lightning_fed.distributed.processes import Processes
from lightning_fed.masks import SANDMask

CASES: dict[str, Callable[[], list[Callback]]] = {
    "FedYogi": lambda: [FedYogi()],
    "ServerOptimizer": lambda: [ServerOptimizer(partial(torch.optim.Adam, lr=0.01)), SCAFFOLD()],
    "FedAvgM": lambda: [FedAvgM(lr=0.7, mask=SANDMask())],
    "GeometricMedian": lambda: [GeometricMedian(lr=0.7)],
    "FedDyn": lambda: [FedDynServer(), FedDyn()],
    "BatchNorm": lambda: [FedAvg(lr=0.7, buffers="average")],
}


class Wide(LightningModule):
    """Wide enough that vector instructions matter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return cross_entropy(self.layers(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def run(name: str, folder: Path, stops: tuple[int, ...]) -> dict[str, Any]:
    """Trains up to each of these rounds, from where the last one stopped; counts what was sent besides sums."""
    x = torch.randn(204, 20, generator=torch.Generator().manual_seed(0))
    sent: list[int] = []
    plain = Processes.broadcast
    for rounds in stops:
        callbacks = CASES[name]()
        trainer = FederatedTrainer(
            accelerator="cpu", devices=2, callbacks=callbacks, max_rounds=rounds, logger=[], seed=1,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(folder), name=f"{name}{stops}",
        )  # fmt: skip
        torch.manual_seed(3)
        net = Wide()
        data = FederatedDataModule(TensorDataset(x, x[:, :5].argmax(1)), num_clients=6, batch_size=17)
        with patch.object(Processes, "broadcast", lambda *args, **options: sent.append(1) or plain(*args, **options)):
            trainer.fit(net, data, ckpt_path="last")
    states = [callback.state_dict() for callback in callbacks]
    buffers = {key: buffer.clone() for key, buffer in net.named_buffers()}
    return {
        "weights": trainer.weights.clone(),
        "buffers": buffers,
        "states": states,
        "rounds": trainer.round,
        "sent": len(sent),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    torch.ones(64).add(1)  # with the instructions that this process chooses for good
    os.environ["ATEN_CPU_CAPABILITY"] = "default"  # for the process that it starts
    folder = Path(sys.argv[1])
    found: dict[str, Any] = {name: run(name, folder, (3,)) for name in CASES}
    found["resumed"] = run("FedYogi", folder, (1, 3))
    found["instructions"] = torch.backends.cpu.get_cpu_capability()
    torch.save(found, folder / f"rank{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    main()
