"""One run: the trainer, its options, its round loop and what it keeps."""

from lightning_fed.core.train_state import FullGradients, Tolerance
from lightning_fed.sampling import Participation
from lightning_fed.trainer.trainer import FederatedTrainer

__all__ = ["FederatedTrainer", "FullGradients", "Participation", "Tolerance"]
