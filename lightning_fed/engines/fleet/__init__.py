"""Clients at the nodes of a fleet: what the server sends and takes; ``trainer.fleet`` has the nodes."""

from lightning_fed.engines.fleet.census import Fleet
from lightning_fed.engines.fleet.data import FleetData
from lightning_fed.engines.fleet.remote import RemoteTrainer
from lightning_fed.engines.fleet.sums import SumsTrainer

__all__ = ["Fleet", "FleetData", "RemoteTrainer", "SumsTrainer"]
