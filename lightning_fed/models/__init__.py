"""LightningModules and the networks they train."""

from lightning_fed.models.backbones import MLP, Backbone, LeNet, LogisticRegression
from lightning_fed.models.classifier import ImageClassifier

__all__ = ["MLP", "Backbone", "ImageClassifier", "LeNet", "LogisticRegression"]
