"""Modules and data of other packages, each as its own documentation trains it under Lightning."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 3


@dataclass
class Given:
    """What a script hands to ``fit`` of Lightning's Trainer, of that package: a module, and data in one of two ways."""

    model: Any
    datamodule: Any = None
    train: Any = None
    val: Any = None
    lightning: str = "lightning.pytorch"

    def data(self) -> dict[str, Any]:
        """The arguments of ``fit`` for the data."""
        if self.datamodule is not None:
            return {"datamodule": self.datamodule}
        return {"train_dataloaders": self.train, "val_dataloaders": self.val}


def graphs() -> Given:
    """Graph classification: torch_geometric's data module, with its own batches of graphs, and two of its layers."""
    pytest.importorskip("torch_geometric")
    from torch_geometric.data.lightning import LightningDataset
    from torch_geometric.datasets import FakeDataset
    from torch_geometric.nn import GCNConv, global_mean_pool

    class GCN(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = GCNConv(8, 16), GCNConv(16, 16)
            self.out = nn.Linear(16, CLASSES)

        def loss(self, data: Any) -> Tensor:
            x = self.conv1(data.x, data.edge_index).relu()
            x = self.conv2(x, data.edge_index).relu()
            return F.cross_entropy(self.out(global_mean_pool(x, data.batch)), data.y)

        def training_step(self, data: Any, batch_idx: int) -> Tensor:
            loss = self.loss(data)
            self.log("train_loss", loss, batch_size=data.num_graphs)
            return loss

        def validation_step(self, data: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(data), batch_size=data.num_graphs)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    train = FakeDataset(60, avg_num_nodes=12, avg_degree=3, num_channels=8, num_classes=CLASSES)
    return Given(GCN(), LightningDataset(train, train[:20], batch_size=5))


def linear_probe() -> Given:
    """lightly's LinearClassifier over a frozen network, built on the package pytorch_lightning."""
    pytest.importorskip("lightly")
    from lightly.utils.benchmarking import LinearClassifier

    backbone = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.ReLU())
    model = LinearClassifier(
        backbone, batch_size_per_device=5, lr=0.5, feature_dim=16, num_classes=CLASSES, topk=(1, 2)
    )
    images, labels = torch.randn(60, 3, 4, 4), torch.arange(60) % CLASSES
    loader = DataLoader(TensorDataset(images, labels), batch_size=5, shuffle=True)
    val = DataLoader(TensorDataset(images, labels), batch_size=20)
    return Given(model, train=loader, val=val, lightning="pytorch_lightning")


def contrastive() -> Given:
    """MoCo as in lightly's examples: a momentum encoder, a memory bank and its loss."""
    pytest.importorskip("lightly")
    from copy import deepcopy

    from lightly.loss import NTXentLoss
    from lightly.models.modules import MoCoProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum

    class MoCo(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(48, 16))
            self.projection_head = MoCoProjectionHead(16, 16, 8)
            self.backbone_momentum = deepcopy(self.backbone)
            self.projection_head_momentum = deepcopy(self.projection_head)
            deactivate_requires_grad(self.backbone_momentum)
            deactivate_requires_grad(self.projection_head_momentum)
            self.criterion = NTXentLoss(memory_bank_size=(32, 8))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            update_momentum(self.backbone, self.backbone_momentum, m=0.99)
            update_momentum(self.projection_head, self.projection_head_momentum, m=0.99)
            first, second = batch
            query = self.projection_head(self.backbone(first))
            with torch.no_grad():
                key = self.projection_head_momentum(self.backbone_momentum(second))
            return self.criterion(query, key)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.06)

    images = torch.randn(60, 3, 4, 4)
    views = TensorDataset(images + 0.1 * torch.randn_like(images), images + 0.1 * torch.randn_like(images))
    return Given(MoCo(), train=DataLoader(views, batch_size=5, drop_last=True))


def forecast() -> Given:
    """A temporal fusion transformer of pytorch_forecasting on 12 series, in its own loaders."""
    pytest.importorskip("pytorch_forecasting")
    import numpy as np
    import pandas as pd
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
    from pytorch_forecasting.metrics import QuantileLoss

    series, length = 12, 30
    time = np.tile(np.arange(length), series)
    frame = pd.DataFrame(
        {
            "time": time,
            "series": np.repeat([f"s{i}" for i in range(series)], length),
            "value": np.sin(time / 3.0) + np.repeat(np.arange(series), length) + 2.0,
        }
    )
    training = TimeSeriesDataSet(
        frame[frame.time < length - 4],
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=8,
        max_prediction_length=4,
        time_varying_unknown_reals=["value"],
        time_varying_known_reals=["time"],
        static_categoricals=["series"],
    )
    validation = TimeSeriesDataSet.from_dataset(training, frame, predict=True, stop_randomization=True)
    model = TemporalFusionTransformer.from_dataset(
        training,
        hidden_size=8,
        attention_head_size=1,
        hidden_continuous_size=4,
        loss=QuantileLoss(),
        learning_rate=0.03,
    )
    return Given(
        model,
        train=training.to_dataloader(train=True, batch_size=8, num_workers=0),
        val=validation.to_dataloader(train=False, batch_size=8, num_workers=0),
    )


def molecules() -> Given:
    """A message-passing network of chemprop on the number of atoms of small molecules."""
    pytest.importorskip("chemprop")
    from chemprop import data, models
    from chemprop import nn as chemprop_nn

    smiles = ["C" * i + tail for i in range(1, 13) for tail in ("O", "N", "=O", "C#N", "")]
    points = [data.MoleculeDatapoint.from_smi(each, [float(len(each))]) for each in smiles]
    train = data.MoleculeDataset(points)
    model = models.MPNN(
        chemprop_nn.BondMessagePassing(d_h=16), chemprop_nn.MeanAggregation(), chemprop_nn.RegressionFFN(input_dim=16)
    )
    return Given(
        model,
        train=data.build_dataloader(train, batch_size=5, num_workers=0),
        val=data.build_dataloader(train, batch_size=20, num_workers=0, shuffle=False),
    )


def sentences() -> Given:
    """A text classifier of transformers from its config, under LoRA of peft, on a data set of Hugging Face."""
    pytest.importorskip("peft")
    pytest.importorskip("datasets")
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification

    class Text(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            config = BertConfig(
                vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                max_position_embeddings=16, num_labels=CLASSES,
            )  # fmt: skip
            lora = LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
            self.model = get_peft_model(BertForSequenceClassification(config), lora)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([w for w in self.parameters() if w.requires_grad], lr=1e-3)

    rows = torch.randint(0, 50, (60, 8), generator=torch.Generator().manual_seed(0))
    texts = Dataset.from_dict({"input_ids": rows.tolist(), "labels": [i % CLASSES for i in range(60)]})
    return Given(Text(), train=DataLoader(texts.with_format("torch"), batch_size=5, shuffle=True))


PACKAGES: dict[str, Callable[[], Given]] = {
    each.__name__: each for each in (graphs, linear_probe, contrastive, forecast, molecules, sentences)
}
