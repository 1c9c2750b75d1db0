"""LightningModules and the networks they train."""

from lightning_fed.models.backbones import CNN, MLP, Backbone, CharLSTM, LeNet, LogisticRegression
from lightning_fed.models.classifier import Classifier, ImageClassifier
from lightning_fed.models.resnet import ResNet18

__all__ = [
    "CNN",
    "MLP",
    "Backbone",
    "CharLSTM",
    "Classifier",
    "ImageClassifier",
    "LeNet",
    "LogisticRegression",
    "ResNet18",
]
