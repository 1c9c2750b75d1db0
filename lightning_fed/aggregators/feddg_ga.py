"""FedDG-GA: weights of clients by how much the averaged model costs each of them."""

from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.aggregators.base import StatefulAggregator
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import Client, Cohort, Need, ReducedUpdate
from lightning_fed.errors import FederatedError, expect_choice, expect_number
from lightning_fed.functional.server import adjusted_weights

__all__ = ["FedDGGA"]


class FedDGGA(StatefulAggregator):
    """Weighs by how much averaging costs a client: w <- w + η_g Σ a_i δ_i, then a_i += d_r (G_i - Ḡ) / max |G - Ḡ|.

    FedDG-GA of Zhang, Xu, Yao, Zhang, Tian, Wang, "Federated Domain Generalization with Generalization Adjustment",
    CVPR 2023. G_i = f_i(w⁺) - f_i(w_i): the client's loss on held-out samples at the new global model, minus that at
    its own trained one. d_r = d (1 - r/R) with r = 0 in the first of the R rounds of
    ``max_rounds``, so a run of more rounds is a new one; a_i is clipped at 0. The a_i of a
    round's clients keep their sum, and clients that are not in it keep theirs. d = 0 is FedAvg, bit for bit.

    Args:
        step_size: d, at least 0.
        losses_over: ``held_out`` for samples that the data hold out of each client for validation, or ``train``.
        **kwargs: Options of every aggregator; ``weighting`` gives the first a_i.
    """

    needs = Need.MEAN | Need.LOSSES
    losses_at = "end"
    reads_length = True

    def __init__(
        self, step_size: float = 0.2, losses_over: Literal["held_out", "train"] = "held_out", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.step_size = expect_number("--aggregator.step_size", step_size, least=0)
        self.losses_over = expect_choice("--aggregator.losses_over", losses_over, ("held_out", "train"))
        self._stepped = False

    @property
    def adjusted(self) -> Tensor | None:
        """a_i by client id, shape (N,), float64, on the CPU, in the unit of the first; None before a round."""
        return self.vectors.get("adjusted")

    def on_round_start(self, trainer: TrainerLike, pl_module: LightningModule, cohort: Cohort) -> None:
        """Begins with the weights of FedAvg, and gives them back to a cohort in which all have fallen to 0."""
        sizes = torch.from_numpy(np.asarray(trainer.client_sizes, dtype=float))
        first = sizes if self.weighting == "samples" else (sizes > 0).double()
        adjusted, drawn = self.vectors.setdefault("adjusted", first.clone()), [client.id for client in cohort.clients]
        if not adjusted[drawn].any():
            adjusted[drawn] = first[drawn]
        self._stepped = False

    def client_weight(self, client: Client) -> float:
        return super().client_weight(client) if self.adjusted is None else float(self.adjusted[client.id])

    def server_step(self, update: ReducedUpdate) -> Tensor:
        self._stepped = True
        return update.mean

    def on_after_server_step(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        """Moves the a_i of the round's clients by their gaps, which takes their losses at the new global model."""
        if not (self.step_size and self._stepped and self.adjusted is not None):
            return
        gaps = (trainer.start_gradients.losses_now(update.clients) - update.losses).numpy()
        if not np.isfinite(gaps).all():
            raise FederatedError(
                f"Expected finite losses at the new global model of round {update.round} for FedDGGA, got NaN or "
                "infinity: lower `--aggregator.lr` or the learning rate in the model's optimizer."
            )
        self.vectors_down = int(update.num_clients < update.num_registered)  # else w⁺ goes to all of them anyway
        step = self.step_size * (1 - (update.round - 1) / trainer.max_rounds)
        entered = [client.id for client in update.clients]
        shares = torch.from_numpy(adjusted_weights(update.weights.numpy(), gaps, step))
        self.adjusted[entered] = shares * self.adjusted[entered].sum()
