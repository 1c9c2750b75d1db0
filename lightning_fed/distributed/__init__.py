"""Training in several processes, which share the clients of each cohort."""

from lightning_fed.distributed.strategy import ClientsStrategy

__all__ = ["ClientsStrategy"]
