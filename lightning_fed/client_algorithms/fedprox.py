"""FedProx: a pull towards the global model."""

from typing import Any

from lightning.pytorch import LightningModule

from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.errors import expect_number
from lightning_fed.functional.clients import difference

__all__ = ["FedProx"]


class FedProx(ClientAlgorithm):
    """Adds μ (w_i - w) to every local gradient: the client minimises f_i(w_i) + (μ/2) ‖w_i - w‖².

    Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020, eq. 2.
    μ = 0 is plain local training, bit for bit.

    Args:
        mu: μ, at least 0.
    """

    stacks = True

    def __init__(self, mu: float = 0.01) -> None:
        self.mu = expect_number("--client.mu", mu, least=0, of="FedProx")

    @property
    def pull(self) -> float:
        return self.mu

    def on_before_optimizer_step(self, trainer: TrainerLike, pl_module: LightningModule, optimizer: Any) -> None:  # type: ignore[override]  # the trainer is ours
        if self.mu > 0:
            term = difference(trainer.vector.data, trainer.origin, self.scratch("moved", trainer.weights))
            trainer.vector.add_to_gradient(term, alpha=self.mu)
