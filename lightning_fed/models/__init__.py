"""LightningModules and the networks they train."""

from lightning_fed.models.backbones import CNN, MLP, Backbone, CharLSTM, LeNet, LogisticRegression, ResNet18
from lightning_fed.models.classifier import Classifier, ImageClassifier

__all__ = [
    "CNN", "MLP", "Backbone", "CharLSTM", "Classifier", "ImageClassifier", "LeNet", "LogisticRegression",
    "ResNet18",
]  # fmt: skip
