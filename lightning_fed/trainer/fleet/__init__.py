"""Nodes of a fleet, each with clients of its own, and a fleet of nodes in one process."""

from lightning_fed.trainer.fleet.local import LocalFleet, SummingFleet
from lightning_fed.trainer.fleet.node import Node

__all__ = ["LocalFleet", "Node", "SummingFleet"]
