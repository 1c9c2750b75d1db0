"""Several processes that share a cohort."""

from lightning_fed.distributed.strategy import ClientsStrategy

__all__ = ["ClientsStrategy"]
