"""Federated averaging with a step length that follows how far the clients' updates differ."""

from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_fed.aggregators.base import StatefulAggregator
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import ReducedUpdate, Update
from lightning_fed.errors import expect_choice, expect_number
from lightning_fed.functional.geometry import wide_dtype
from lightning_fed.functional.server import fedexp_factor

__all__ = ["FedExP"]


class FedExP(StatefulAggregator):
    """Goes further along the mean the more the updates differ: w <- w + η_g max(1, Σ p_i ‖δ_i‖² / (2 (‖Δ‖² + ε))) Δ.

    Jhunjhunwala, Wang, Joshi, "FedExP: Speeding up Federated Averaging via Extrapolation", ICLR 2023, Algorithm 1, with
    p_i = 1/n. Where the maximum is 1, as for one client or clients that agree, it is FedAvg, bit for bit. The iterates
    oscillate around the optimum, so the mean of the last two is validated, tested and saved as the model. Clients start
    from the last one. Hooks outside validation and tests, such as those of ``ClientEvaluation``, see the last one too.

    Args:
        epsilon: ε, at least 0, in units of squared updates: bounds the factor where ‖Δ‖² is smaller.
        evaluate: Which model is evaluated and saved: the ``mean_of_two`` last iterates or the ``last`` one.
        weighting: p_i before normalisation: 1 (``uniform``) or s_i (``samples``, as in the authors' code).
        **kwargs: Options of every aggregator.
    """

    stacks = True

    def __init__(
        self,
        epsilon: float = 0.0,
        evaluate: Literal["mean_of_two", "last"] = "mean_of_two",
        weighting: Literal["samples", "uniform"] = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(weighting=weighting, **kwargs)
        self.epsilon = expect_number("--aggregator.epsilon", epsilon, least=0)
        self.evaluate = expect_choice("--aggregator.evaluate", evaluate, ("mean_of_two", "last"))

    def on_client_end(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        """Sends ‖δ_i‖², of the update as it reaches the server: aggregators are called last."""
        length = torch.linalg.vector_norm(update.delta, dtype=wide_dtype(update.delta))
        update.send("FedExP", length.square(), update.weight)

    def step(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        self._squares = update.sums["FedExP"] / sum(self.client_weight(client) for client in update.clients)
        if self.evaluate == "mean_of_two":
            self.vectors["former"] = trainer.weights.clone()
        super().step(trainer, pl_module, update)
        pl_module.log("fedexp/factor", self._factor)

    def server_step(self, update: ReducedUpdate) -> Tensor:
        self._factor = fedexp_factor(update.mean, self._squares, self.epsilon)
        return update.mean * self._factor.to(update.mean.dtype)

    def _show(self, trainer: Any, *args: Any) -> None:
        """Puts the mean of the last two iterates into the module, within ``fit``."""
        if self.vectors and trainer.state.fn == TrainerFn.FITTING:
            trainer.vector.data.copy_(torch.lerp(trainer.weights, self.recall("former", trainer.weights), 0.5))

    def _hide(self, trainer: Any, *args: Any) -> None:
        """Puts the last iterate, from which clients start, back into the module."""
        if self.vectors and trainer.state.fn == TrainerFn.FITTING:
            trainer.vector.data.copy_(trainer.weights)

    on_validation_start = on_test_start = on_train_end = _show  # type: ignore[assignment]  # the trainer is ours
    on_validation_end = on_test_end = _hide  # type: ignore[assignment]  # the same

    def on_save_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Saves the mean as the model and the last iterate beside it, as Lightning's WeightAveraging does."""
        if self.vectors:  # the module's weights, in a validation the mean, are restored at the end
            held, layout = trainer.vector.data.clone(), checkpoint["state_dict"]
            for key, put in (("current_model_state", self._hide), ("state_dict", self._show)):
                put(trainer)
                now = pl_module.state_dict()
                tensors = {name: value for name, value in layout.items() if isinstance(value, Tensor)}
                checkpoint[key] = layout | {name: v.clone().copy_(now[name]) for name, v in tensors.items()}
            trainer.vector.data.copy_(held)
