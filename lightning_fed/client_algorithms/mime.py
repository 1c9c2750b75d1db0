"""MimeLite: local steps with the server's momentum, which only the clients' full gradients change."""

from typing import Any

from lightning.pytorch import LightningModule

from lightning_fed.client_algorithms.fedcm import MomentumAlgorithm
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import ReducedUpdate, StartGradient, Update
from lightning_fed.errors import expect_number

__all__ = ["MimeLite"]


class MimeLite(MomentumAlgorithm):
    """Replaces every local gradient g by (1 - β) g + β m, with the server's m <- β m + (1 - β) Σ p_i ∇f_i(w).

    Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh, "Breaking the centralized barrier for cross-device federated
    learning", NeurIPS 2021, Algorithm 1 (MimeLite) with the momentum of SGDm. ∇f_i(w) is over all of a client's data at
    the model that the round starts from, the mean is over the round's clients, m is fixed during the round and 0 in the
    first. Terms of other algorithms are added after it. β = 0 is plain local training, bit for bit.

    Args:
        beta: β in [0, 1).
    """

    def __init__(self, beta: float = 0.9) -> None:
        self.beta = expect_number("--client.beta", beta, least=0, below=1, of="MimeLite")
        self.sends_gradient, self.vectors_down = beta > 0, int(beta > 0)

    def start_gradients(self, round: int) -> StartGradient:
        return "client" if self.beta else "none"

    def on_before_optimizer_step(self, trainer: TrainerLike, pl_module: LightningModule, optimizer: Any) -> None:  # type: ignore[override]  # our trainer stands in
        self.mix(trainer, 1 - self.beta, self.beta)

    def on_client_end(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        if self.beta:  # the gradient is counted as such, as others may need it too
            gradient, weight = trainer.start_gradients.gradient, trainer.update_weight(update.client)
            update.send(type(self).__name__, gradient, weight, implied=True)

    def on_round_end(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        """Moves m by the mean of the round's gradients, unless the round leaves the model as it is."""
        if self.beta:
            assert self.momentum is not None
            self.momentum = self.momentum.mul(self.beta).add_(self.mean(trainer, update), alpha=1 - self.beta)
