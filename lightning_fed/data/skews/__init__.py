"""Feature skews: what a sample looks like depends on the client that holds it, computed batch by batch."""

from lightning_fed.data.skews.base import DataFacts, FeatureSkew, SkewedBatches, SkewedRows, SkewedSource
from lightning_fed.data.skews.images import BinaryColors, ClassColors, ClientColors, ClientRotation

__all__ = [
    "BinaryColors", "ClassColors", "ClientColors", "ClientRotation", "DataFacts", "FeatureSkew", "SkewedBatches",
    "SkewedRows", "SkewedSource",
]  # fmt: skip
