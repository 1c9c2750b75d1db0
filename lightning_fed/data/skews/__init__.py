"""Feature skews: what a sample looks like depends on the client that holds it, computed batch by batch."""

from lightning_fed.data.skews.base import FeatureSkew
from lightning_fed.data.skews.class_colors import BinaryColors, ClassColors
from lightning_fed.data.skews.client_colors import ClientColors
from lightning_fed.data.skews.facts import DataFacts
from lightning_fed.data.skews.rotation import ClientRotation
from lightning_fed.data.skews.views import SkewedBatches, SkewedRows, SkewedSets, SkewedSource

__all__ = [
    "BinaryColors", "ClassColors", "ClientColors", "ClientRotation", "DataFacts", "FeatureSkew", "SkewedBatches",
    "SkewedRows", "SkewedSets", "SkewedSource",
]  # fmt: skip
