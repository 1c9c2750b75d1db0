"""What a trainer's parts, LightningModules and callbacks read of it."""

from lightning_fed.trainer.lightning_names.forwarding import derived, forwarded
from lightning_fed.trainer.lightning_names.names import LightningNames

__all__ = ["LightningNames", "derived", "forwarded"]
