"""FedLab as a side of a row: its standalone pipeline, one process (https://github.com/SMILELab-FL/FedLab)."""

from collections.abc import Iterator
from typing import Any

import torch
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.contrib.dataset.basic_dataset import FedDataset
from fedlab.core.standalone import StandalonePipeline
from torch import Tensor

from benchmarks.contestants.contestant import Contestant
from benchmarks.race.turns import Turns
from benchmarks.workloads import Data, Work

__all__ = ["take_part"]


class Clients(FedDataset):
    """Batches by index, which is faster than the data loader that FedLab's own data sets make for each client."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        self.data, self.num = data, len(data.clients)

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> Iterator[tuple[Tensor, Tensor]]:
        """Yields one epoch of a client in random order."""
        rows = self.data.clients[id]
        for index in rows[torch.randperm(len(rows))].split(batch_size):
            yield self.data.images[index], self.data.labels[index]


class MomentumTrainer(SGDSerialClientTrainer):
    """FedLab's SGD client, with momentum that begins anew for each client."""

    def setup_optim(self, epochs: int, batch_size: int, lr: float, momentum: float = 0.0) -> None:
        """Makes the optimizer."""
        super().setup_optim(epochs, batch_size, lr)
        self.optimizer = torch.optim.SGD(self._model.parameters(), lr, momentum)

    def train(self, model_parameters: Tensor, train_loader: Any) -> list[Tensor]:
        """Trains one client."""
        self.optimizer.state.clear()
        uploaded: list[Tensor] = super().train(model_parameters, train_loader)
        return uploaded


class Pipeline(StandalonePipeline):
    """FedLab's loop, whose evaluation ends a round and begins the next one."""

    def __init__(self, handler: SyncServerHandler, trainer: MomentumTrainer, turns: Turns) -> None:
        super().__init__(handler, trainer)
        self.turns = turns

    def evaluate(self) -> None:
        """Waits between two rounds."""
        self.turns.end()
        if not self.handler.if_stop:
            self.turns.begin()


def take_part(turns: Turns, work: Work, side: Contestant, rounds: int) -> None:
    """Trains by turns."""
    model = work.model()
    trainer = MomentumTrainer(model, work.clients)
    trainer.setup_dataset(Clients(work.data()))
    trainer.setup_optim(1, work.batch, work.lr, work.momentum)
    handler = SyncServerHandler(model, rounds, work.per_round / work.clients)
    pipeline = Pipeline(handler, trainer, turns)
    turns.begin()
    pipeline.main()
