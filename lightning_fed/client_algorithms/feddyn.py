"""The clients' half of FedDyn."""

from typing import Any

from lightning.pytorch import LightningModule

from lightning_fed.aggregators.feddyn import FedDynServer
from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import Client, Update
from lightning_fed.errors import FederatedError
from lightning_fed.functional.clients import difference

__all__ = ["FedDyn"]


class FedDyn(ClientAlgorithm):
    """Changes a client's objective to f_i(θ) - ⟨h_i, θ⟩ + (α/2) ‖θ - w‖²; then h_i <- h_i - α δ_i.

    Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic Regularization", ICLR
    2021, Algorithm 1. It needs the aggregator ``FedDynServer``, and uses its α. The client keeps h_i, which starts at
    zero: a client's first round is FedProx with μ = α.
    """

    stacks = True
    adds_linear_term = True
    server_half = FedDynServer

    _alpha = 0.0

    @property
    def pull(self) -> float:
        return self._alpha

    def check(self, trainer: TrainerLike) -> None:
        super().check(trainer)
        if not isinstance(trainer.aggregator, FedDynServer):
            raise FederatedError(
                f"Expected the aggregator FedDynServer, the server's half of FedDyn, got "
                f"{type(trainer.aggregator).__name__}: set `--aggregator FedDynServer`."
            )
        self._alpha = trainer.aggregator.alpha

    def on_client_start(self, trainer: TrainerLike, pl_module: LightningModule, client: Client) -> None:
        trainer.client_states.recall("FedDyn", client.id, self.scratch("own", trainer.weights))

    def on_before_optimizer_step(self, trainer: TrainerLike, pl_module: LightningModule, optimizer: Any) -> None:  # type: ignore[override]  # the trainer is ours
        own = self.scratch("own", trainer.weights)
        term = difference(trainer.vector.data, trainer.origin, self.scratch("term", own))
        trainer.vector.add_to_gradient(term.mul_(self._alpha).sub_(own))

    def on_client_entered(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        """Stores h_i - α δ_i, with the same δ_i as the server: so its h stays the mean of the h_i."""
        own = self.scratch("own", trainer.weights)
        trainer.client_states.store("FedDyn", update.client.id, own.sub_(update.delta, alpha=self._alpha))
