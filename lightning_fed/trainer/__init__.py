"""One run: the trainer, its options, its round loop and what it keeps."""

from lightning_fed.trainer.trainer import FederatedTrainer

__all__ = ["FederatedTrainer"]
