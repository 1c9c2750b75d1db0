"""Feature skews: what a sample looks like depends on the client that holds it, computed batch by batch."""

from lightning_fed.data.skews.base import DataFacts, FeatureSkew
from lightning_fed.data.skews.colors import BinaryColors, ClassColors, ClientColors
from lightning_fed.data.skews.rotation import ClientRotation
from lightning_fed.data.skews.views import SkewedBatches, SkewedRows, SkewedSource

__all__ = [
    "BinaryColors", "ClassColors", "ClientColors", "ClientRotation", "DataFacts", "FeatureSkew", "SkewedBatches",
    "SkewedRows", "SkewedSource",
]  # fmt: skip
