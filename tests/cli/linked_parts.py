"""Models and data of a user's own, for what the command line links between them."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fed.data import Datasets, FederatedDataModule


class Facts(FederatedDataModule):
    """Data that tell everything: grey images of 12 x 12, 4 classes; counts how often they are read.

    Args:
        names: Number of class names.
        width: Of the images.
    """

    read = 0

    def __init__(self, names: int = 4, width: int = 12, num_clients: int = 3) -> None:
        super().__init__(train_dataset=None, num_clients=num_clients, batch_size=4)
        self.names = names
        self.shape = (1, 12, width)

    def load_datasets(self) -> Datasets:
        Facts.read += 1
        labels = torch.arange(24) % self.names
        names = [f"class{i}" for i in range(self.names)]
        train = TensorDataset(torch.rand(24, *self.shape), labels)
        return Datasets(train, class_names=names, mean=(0.5,), std=(0.25,))


class Silent(LightningDataModule):
    """Data that tell nothing of themselves, neither classes nor shapes."""

    def train_source(self):
        raise AssertionError("nobody asks for batches of it")


class Model(LightningModule):
    """A model with linked and other arguments, none of which it needs at once."""

    def __init__(self, num_classes: int, hidden: int = 5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(hidden, num_classes)


class Everything(LightningModule):
    """A model that asks for everything; ``head`` has arguments of the same names with other meanings."""

    def __init__(
        self,
        class_names: list[str] | None = None,
        input_shape: tuple[int, ...] = (3, 2, 2),
        image_size: tuple[int, int] = (1, 1),
        mean: float | None = None,
        std: list[float] | None = None,
        head: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.told = {"names": class_names, "shape": input_shape, "size": image_size, "mean": mean, "std": std}
        self.head = head


class Drawn(LightningModule):
    """A model whose ``mean`` and ``std`` say how its weights are drawn."""

    def __init__(self, mean: float = 0.0, std: float = 0.02, num_classes: int = 7) -> None:
        super().__init__()
        self.mean, self.std, self.num_classes = mean, std, num_classes


class Untyped(LightningModule):
    """A model without annotations."""

    def __init__(self, num_classes, in_features=3) -> None:
        super().__init__()
        self.sizes = (num_classes, in_features)


class Wrapper(LightningModule):
    """A model whose backbone may be any module."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone


def make_net(num_classes: int, in_features: int, width: int = 2) -> nn.Module:
    """Makes a network."""
    return nn.Sequential(nn.Linear(in_features, width), nn.Linear(width, num_classes))


class Exploding(LightningModule):
    """A model that must not be built."""

    def __init__(self, num_classes: int = 3) -> None:
        raise AssertionError("no model is needed to look at data")
