"""FedSAM and FedLESAM: local steps along the gradient at a worse point close by."""

from typing import Any, Literal

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import Client, Cohort, ReducedUpdate, Update
from lightning_fed.errors import expect_choice, expect_number
from lightning_fed.functional.local import of_length

__all__ = ["FedLESAM", "FedSAM"]


class FedSAM(ClientAlgorithm):
    """Takes every local gradient uphill of the weights: g = ∇f(w_i + ρ ∇f(w_i) / ‖∇f(w_i)‖), both on one batch.

    Qu, Li, Duan, Liu, Tang, Lu, "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022, Algorithm
    1, FedSAM. Terms of other algorithms are added to g, not to the gradient that it climbs by; with FedCM, which scales
    g, it is MoFedSAM. ρ = 0 is plain local training, bit for bit, and takes no second gradient.

    Args:
        rho: ρ of at least 0, in units of the weights.
    """

    stacks = True
    replaces_gradient = True

    def __init__(self, rho: float = 0.05) -> None:
        self.rho = expect_number("--client.rho", rho, least=0, of="FedSAM")
        self.takes_second_gradient = rho > 0

    def on_before_optimizer_step(self, trainer: TrainerLike, pl_module: LightningModule, optimizer: Any) -> None:  # type: ignore[override]  # our trainer stands in
        if not self.rho:
            return
        vector, point = trainer.vector, self.scratch("point", trainer.weights)
        of_length(self.rho, point.copy_(vector.grad)).add_(vector.data)
        trainer.gradient_at(point, point)
        vector.grad.copy_(point)


class FedLESAM(ClientAlgorithm):
    """Takes every local gradient uphill of the server's way: g = ∇f(w_i + ρ (w_old - w) / ‖w_old - w‖).

    Fan, Hu, Yao, Niu, Zhang, Sugiyama, Wang, "Locally Estimated Global Perturbations are Better than Local
    Perturbations for Federated Sharpness-aware Minimization", ICML 2024. w_old is the global model that the client got
    in its last round (``own``, the paper), which it keeps, or that the server had before its last step (``last``, the
    authors' code), which goes down with the model. A client without w_old climbs nowhere. The norm is over the whole
    vector; the authors' code takes the sum of the tensors' norms, which makes the way shorter. ρ = 0 is plain local
    training, bit for bit.

    Args:
        rho: ρ of at least 0, in units of the weights.
        since: Whose former model is w_old: that of the client's ``own`` last round, or of the server's ``last``.
    """

    stacks = True
    displaces = True
    adds_to_gradient = False

    def __init__(self, rho: float = 0.1, since: Literal["own", "last"] = "own") -> None:
        self.rho = expect_number("--client.rho", rho, least=0, of="FedLESAM")
        self.since = expect_choice("--client.since", since, ("own", "last"), of="FedLESAM")
        self.vectors_down = int(rho > 0 and since == "last")
        self._old: Tensor | None = None
        self._shift: Tensor | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._old = self._shift = None

    def on_round_start(self, trainer: TrainerLike, pl_module: LightningModule, cohort: Cohort) -> None:
        if self._old is not None:
            self._shift = of_length(self.rho, trainer.weights - self._old.to(trainer.weights))

    def on_client_start(self, trainer: TrainerLike, pl_module: LightningModule, client: Client) -> None:
        if self.vectors_down:
            trainer.displacement = self._shift
        elif self.rho:
            shift = self.scratch("shift", trainer.weights)
            if trainer.client_states.recall("FedLESAM", client.id, shift):
                trainer.displacement = of_length(self.rho, shift.sub_(trainer.received).neg_())

    def on_client_entered(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        if self.rho and self.since == "own":
            trainer.client_states.store("FedLESAM", update.client.id, trainer.received)

    def on_before_server_step(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        if self.vectors_down:
            self._old = trainer.weights.clone()

    def state_dict(self) -> dict[str, Any]:
        return {} if self._old is None else {"old": self._old}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._old = state_dict.get("old")
