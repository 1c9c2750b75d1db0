"""Data modules and models in the manner of users, which know nothing of clients."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from tests.parts import CLASSES, FEATURES, Classifier, points


class TheirData(pl.LightningDataModule):
    """Splits off a validation set at random, scales each batch, and knows a number that the model asks for."""

    width = FEATURES

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare")

    def setup(self, stage: str) -> None:
        self.calls.append(stage)
        self.train, self.val = random_split(points(50), [40, 10])

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, 5)

    def test_dataloader(self) -> Any:
        return {"near": DataLoader(points(6, seed=2), 3), "far": DataLoader(points(4, seed=3), 2)}

    def predict_dataloader(self) -> Any:
        return [DataLoader(points(6, seed=2), 3), DataLoader(points(4, seed=3), 2)]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [2 * batch[0], *batch[1:]]


class Watching(Classifier):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.trainer.datamodule.width == FEATURES
        self.seen.append(batch[0].clone())
        return self.loss(batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test/loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return len(batch[0])


class Texts(Dataset[Any]):
    """Sentences of 1 to 6 words, in dicts."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": torch.arange(1 + index % 6), "label": index % CLASSES}


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pads the sentences of a batch to one length."""
    tokens = nn.utils.rnn.pad_sequence([sample["tokens"] for sample in samples], batch_first=True)
    return {"tokens": tokens, "label": torch.tensor([sample["label"] for sample in samples])}


class TextData(pl.LightningDataModule):
    """Texts in batches of 4."""

    def train_dataloader(self) -> Any:
        return DataLoader(Texts(), 4, shuffle=True, collate_fn=padded)

    def val_dataloader(self) -> Any:
        return DataLoader(Texts(), 4, collate_fn=padded)


class TextClassifier(pl.LightningModule):
    """The mean of embedded words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.words(batch["tokens"]).mean(dim=1), batch["label"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class WithOwnData(Watching):
    """Makes its data in ``setup``, which must be called once."""

    def setup(self, stage: str) -> None:
        assert not hasattr(self, "data")
        self.data: TensorDataset = points(30)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, 3)

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, 6)
