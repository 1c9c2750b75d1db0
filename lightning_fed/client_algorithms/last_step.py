"""Algorithms whose local steps look at the way that the server went: FedLESAM and FedGaLA."""

from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import Client, Cohort, ReducedUpdate, Update
from lightning_fed.errors import expect_choice, expect_number
from lightning_fed.functional.local import of_length

__all__ = ["FedGaLA", "FedLESAM"]


class _LastStepAlgorithm(ClientAlgorithm):
    """The base of algorithms whose clients get the server's last step, if ``vectors_down`` is not 0.

    Attributes:
        last_step: w - w_old, shape (d,), as the server took it; None before the second round.
    """

    last_step: Tensor | None = None
    _old: Tensor | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._old = self.last_step = None

    def on_round_start(self, trainer: TrainerLike, pl_module: LightningModule, cohort: Cohort) -> None:
        if self._old is not None:
            self.last_step = trainer.weights - self._old.to(trainer.weights)

    def on_before_server_step(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        if self.vectors_down:
            self._old = trainer.weights.clone()

    def state_dict(self) -> dict[str, Any]:
        return {} if self._old is None else {"old": self._old}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._old = state_dict.get("old")


class FedLESAM(_LastStepAlgorithm):
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
        self._shift: Tensor | None = None

    def on_round_start(self, trainer: TrainerLike, pl_module: LightningModule, cohort: Cohort) -> None:
        super().on_round_start(trainer, pl_module, cohort)
        self._shift = None if self.last_step is None else of_length(self.rho, self.last_step.clone())

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


class FedGaLA(_LastStepAlgorithm):
    """Drops gradients, tensor by tensor, by the angle to the server's last step: g_l <- 0 where cos(g_l, Δ_l) < τ.

    Δ is that step. Pourpanah, Molahasani, Soltany, Greenspan, Etemad, "Federated Unsupervised Domain Generalization
    Using Global and Local Alignment of Gradients", AAAI 2025: local alignment as the authors' code has it, whose server
    half is ``FedGaLAServer``. As g points uphill, that keeps steps against Δ; ``compare`` ``step`` takes cos(-g_l, Δ_l)
    and keeps those along it. A tensor that is 0 in g or Δ has no direction and is kept. In the first round, and with
    τ = -1, it is plain training, bit for bit.

    Args:
        threshold: τ in [-1, 1].
        compare: Whether the ``gradient`` g, or the ``step`` -g, has to go the way of Δ.
    """

    stacks = True
    scales_gradient = True

    def __init__(self, threshold: float = 0.0, compare: Literal["gradient", "step"] = "gradient") -> None:
        self.threshold = expect_number("--client.threshold", threshold, least=-1, most=1, of="FedGaLA")
        self.compare = expect_choice("--client.compare", compare, ("gradient", "step"), of="FedGaLA")
        self.vectors_down = int(threshold > -1)

    def on_round_start(self, trainer: TrainerLike, pl_module: LightningModule, cohort: Cohort) -> None:
        super().on_round_start(trainer, pl_module, cohort)
        self._sizes = [p.numel() for p in trainer.vector.parameters]

    def on_before_optimizer_step(self, trainer: TrainerLike, pl_module: LightningModule, optimizer: Any) -> None:  # type: ignore[override]  # our trainer stands in
        if self.last_step is None:
            return
        sign = -1 if self.compare == "step" else 1
        gradients = torch.split(trainer.vector.grad, self._sizes, dim=-1)
        for gradient, way in zip(gradients, torch.split(self.last_step, self._sizes), strict=True):
            along = sign * (gradient @ way.to(gradient))
            lengths = torch.linalg.vector_norm(gradient, dim=-1) * torch.linalg.vector_norm(way)
            gradient.mul_((along >= self.threshold * lengths)[..., None])
