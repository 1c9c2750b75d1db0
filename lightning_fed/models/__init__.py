"""LightningModules and the networks they train."""

from lightning_fed.models.backbones import CNN, MLP, Backbone, LeNet, LogisticRegression
from lightning_fed.models.classifier import ImageClassifier

__all__ = ["CNN", "MLP", "Backbone", "ImageClassifier", "LeNet", "LogisticRegression"]
