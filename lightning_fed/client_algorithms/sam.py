"""Local steps by gradients at two points: FedSAM, and Δ-SGD, whose step size they give."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch.optim import SGD

from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import Client, Need, Update
from lightning_fed.errors import expect, expect_number
from lightning_fed.functional.clients import of_length

__all__ = ["DeltaSGD", "FedSAM"]


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


class DeltaSGD(ClientAlgorithm):
    """Takes the client's step size from its own steps: η_k = min(γ ‖w_k - w_{k-1}‖ / 2 ‖g_k - g'‖, √(1 + δ θ) η_{k-1}).

    g' is the gradient of the step's batch at w_{k-1}, θ = η_{k-1} / η_{k-2}. Each round of a client begins with η_0 and
    θ_0. Kim, Toghani, Uribe, Kyrillidis, "Adaptive Federated Learning with Auto-Tuned Clients", ICLR 2024, Algorithm 1
    (Δ-SGD) with its constants. The module's SGD takes the steps, at η_k whatever its learning rate. Where nothing moved
    or turned the second bound counts alone.

    Args:
        initial: η_0, above 0.
        gamma: γ, above 0.
        delta: δ, at least 0; 0 never makes a step longer than η_0.
        theta: θ_0, above 0.
    """

    stacks = True
    scales_gradient = True
    takes_second_gradient = True

    def __init__(self, initial: float = 0.2, gamma: float = 2.0, delta: float = 0.1, theta: float = 1.0) -> None:
        self.initial = expect_number("--client.initial", initial, above=0, of="DeltaSGD")
        self.gamma = expect_number("--client.gamma", gamma, above=0, of="DeltaSGD")
        self.delta = expect_number("--client.delta", delta, least=0, of="DeltaSGD")
        self.theta = expect_number("--client.theta", theta, above=0, of="DeltaSGD")

    def check(self, trainer: TrainerLike) -> None:
        """Refuses what would change the length of steps, and terms that the step size would not see."""
        super().check(trainer)
        (optimizer,), own = trainer.optimizers, Callback.on_before_optimizer_step
        algorithms = [part for part in trainer.callbacks if isinstance(part, ClientAlgorithm) and part is not self]
        others = [type(part).__name__ for part in algorithms if type(part).on_before_optimizer_step is not own]
        groups, clip = optimizer.param_groups, trainer.gradient_clip_val
        given = {(group["lr"], group.get("momentum"), group.get("weight_decay")) for group in groups}
        plain = isinstance(optimizer, SGD) and given == {(groups[0]["lr"], 0, 0)}
        options = f"{type(optimizer).__name__} with {given}"
        for holds, wanted, option, got in (
            (plain, "SGD with one learning rate, no momentum and no weight decay", "--model.optimizer", options),
            (not clip, "no clipping", "--trainer.gradient_clip_val", clip),
            (not others, "no other algorithm that changes gradients", "--client", " and ".join(others)),
        ):
            expect(
                holds, f"Expected {wanted} with DeltaSGD, which sets each step's length, got {got}: change `{option}`."
            )

    def on_client_start(self, trainer: TrainerLike, pl_module: LightningModule, client: Client) -> None:
        rates = self.scratch("rates", trainer.weights.new_empty(3))
        rates[0], rates[1], rates[2] = self.initial, self.theta, 0.0

    def on_before_optimizer_step(self, trainer: TrainerLike, pl_module: LightningModule, optimizer: Any) -> None:  # type: ignore[override]  # our trainer stands in
        vector = trainer.vector
        rates, former = self.scratch("rates", trainer.weights.new_empty(3)), self.scratch("former", vector.data)
        rate, theta, way = torch.split(rates, 1, dim=-1)
        if trainer.local_step:
            turned = self.scratch("turned", vector.data)
            trainer.gradient_at(former, turned)
            apart = (former.sub_(vector.data), turned.sub_(vector.grad))
            moved, turn = (torch.linalg.vector_norm(each, dim=-1, keepdim=True, dtype=rates.dtype) for each in apart)
            grown = (1 + self.delta * theta).sqrt() * rate
            bound = torch.where((moved > 0) & (turn > 0), self.gamma / 2 * moved / turn, torch.inf)
            new = torch.minimum(bound, grown)
            theta.copy_(new / rate)
            rate.copy_(new)
        way.add_(rate)
        former.copy_(vector.data)
        if lr := float(optimizer.param_groups[0]["lr"]):  # of 0 there is no step
            vector.scale_gradient(rate / lr)

    def on_client_end(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        """Says how far the steps went, Σ η_k, to rules that ask, as FedNova does."""
        if Need.NORMALIZED_MEAN in trainer.aggregator.all_needs:
            way = self.scratch("rates", trainer.weights.new_empty(3))[2]
            update.optimizer_distance = float(way) * update.client.lr_factor
