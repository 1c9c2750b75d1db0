"""The models of the package, small, each with data for it."""

import torch
from torch.utils.data import TensorDataset

from lightning_fed.data import FederatedDataModule
from lightning_fed.models import CNN, MLP, CharLSTM, Classifier, ImageClassifier, LeNet, LogisticRegression, ResNet18
from tests.engines.parts import CLASSES, SIZES, data


def images(side: int, channels: int = 1, classes: int = CLASSES) -> FederatedDataModule:
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(sum(SIZES), channels, side, side, generator=rng)
    return data(TensorDataset(x, torch.randint(classes, (sum(SIZES),), generator=rng)))


def windows() -> FederatedDataModule:
    rng = torch.Generator().manual_seed(3)
    x = torch.randint(12, (sum(SIZES), 7), generator=rng)
    return data(TensorDataset(x, torch.randint(12, (sum(SIZES),), generator=rng)))


PACKAGE = {
    "LogisticRegression": (lambda: ImageClassifier(LogisticRegression(64, CLASSES), CLASSES), lambda: images(8)),
    "MLP": (lambda: ImageClassifier(MLP(64, num_classes=CLASSES), CLASSES), lambda: images(8)),
    "LeNet": (lambda: ImageClassifier(LeNet(CLASSES, image_size=12), CLASSES), lambda: images(12)),
    "CNN": (lambda: ImageClassifier(CNN(CLASSES, channels=(4,), image_size=8), CLASSES), lambda: images(8)),
    "ResNet18": (lambda: ImageClassifier(ResNet18(CLASSES), CLASSES), lambda: images(8, 3)),
    "CharLSTM": (lambda: Classifier(CharLSTM(12, embedding_dim=3, hidden_size=4), 12), windows),
}
SMALL = [name for name in PACKAGE if name != "ResNet18"]  # 11 million weights, in double precision
