"""Random reading of samples within a run: every batch of every epoch, client and round draws numbers of its own."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.parts import FEATURES, Classifier, Tape, federated_data, federated_trainer


class Augmented(Dataset[Any]):
    """Samples that are nothing but noise."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(FEATURES), index % 3


class DrawsToo(Classifier):
    """Draws from the global stream in training, as dropout does."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.drawn.append(torch.rand(FEATURES))
        return self.loss(batch)


def test_no_two_batches_of_a_run_read_the_same_numbers(tmp_path):
    tape, module = Tape(), DrawsToo()
    trainer = federated_trainer(tmp_path, tape, max_rounds=2, local_epochs=3)
    trainer.fit(module, federated_data(24, 24, dataset=Augmented()))
    batches = [batch[0] for epoch in tape.epochs for batch in epoch]
    assert [len(epoch) for epoch in tape.epochs] == [3] * (2 * 2 * 3)
    samples = torch.cat([*batches, torch.stack(module.drawn)])
    assert len(samples.unique(dim=0)) == len(samples) == 2 * 2 * 3 * (24 + 3)
