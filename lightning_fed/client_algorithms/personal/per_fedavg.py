"""Per-FedAvg: a global model from which one gradient step gives each client a good one of its own."""

from typing import Any, Literal

from lightning.pytorch import LightningModule

from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.errors import expect_choice, expect_number

__all__ = ["PerFedAvg"]


class PerFedAvg(ClientAlgorithm):
    """Trains the loss after one step, F_i(w) = f_i(w - α ∇f_i(w)): g = (I - α ∇²f_i(w)) u, u = ∇f_i(w - α ∇f_i(w)).

    Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
    Meta-Learning Approach", NeurIPS 2020, Algorithm 1. The gradients are over independent parts of each batch: the step
    inside over the first, u over the second, the Hessian over a third. In ``first_order`` g = u; in ``hessian_free``
    ∇²f_i(w) u is (∇f_i(w + δ u) - ∇f_i(w - δ u)) / 2δ. The rate of the outer step is the module's optimizer's. A
    client's own model is the global one after a step of its own. α = 0 is plain local training on a part of each batch.

    Args:
        alpha: α of at least 0, the rate of the step inside.
        form: How the Hessian is taken.
        delta: δ above 0.
    """

    stacks = True
    replaces_gradient = True
    takes_second_gradient = True

    def __init__(
        self,
        alpha: float = 0.01,
        form: Literal["first_order", "hessian_free"] = "first_order",
        delta: float = 0.001,
    ) -> None:
        self.alpha = expect_number("--client.alpha", alpha, least=0, of="PerFedAvg")
        self.form = expect_choice("--client.form", form, ("first_order", "hessian_free"), of="PerFedAvg")
        self.delta = expect_number("--client.delta", delta, above=0, of="PerFedAvg")

    def on_before_optimizer_step(self, trainer: TrainerLike, pl_module: LightningModule, optimizer: Any) -> None:  # type: ignore[override]  # our trainer stands in
        vector, hessian_free = trainer.vector, self.form == "hessian_free"
        parts, point = 3 if hessian_free else 2, self.scratch("point", trainer.weights)
        gradient = self.scratch("gradient", point)
        trainer.gradient_at(vector.data, gradient, part=(0, parts))
        point.copy_(vector.data).sub_(gradient, alpha=self.alpha)
        trainer.gradient_at(point, gradient, part=(1, parts))
        if hessian_free:
            sides = []
            for side in (1, -1):
                point.copy_(vector.data).add_(gradient, alpha=side * self.delta)
                sides.append(self.scratch(f"side {side}", point))
                trainer.gradient_at(point, sides[-1], part=(2, parts))
            gradient.sub_(sides[0].sub_(sides[1]), alpha=self.alpha / (2 * self.delta))
        vector.grad.copy_(gradient)
