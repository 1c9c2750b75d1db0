"""The attributes of a trainer that its parts, LightningModules and callbacks read."""

from lightning_fed.trainer.lightning_names.forwarding import derived, forwarded
from lightning_fed.trainer.lightning_names.names import LightningNames

__all__ = ["LightningNames", "derived", "forwarded"]
