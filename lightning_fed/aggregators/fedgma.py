"""FedGMA as first published: the averaged model and a masked gradient step."""

from typing import Any, Literal, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.aggregators.base import Aggregator
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import Client, Need, ReducedUpdate, Update
from lightning_fed.errors import expect_choice, expect_number
from lightning_fed.functional.masks import gradient_and_mask

__all__ = ["FedGMA"]


class FedGMA(Aggregator):
    """Adds a gradient step on the coordinates where clients agree: w <- w + η_g Δ - η_s M ⊙ Σ p_i g_i.

    M is 1 where enough clients share the sign of the gradient g_i, else 0 (Tenison, Francis, Rish, "Gradient-Masked
    Federated Optimization", 2021, Algorithm 1; see ``gradient_and_mask``). η_s = 0 is FedAvg, bit for bit. The paper
    contradicts itself on where g_i is computed, on what p means and on the weights p_i; each is an option. The mask of
    Tenison et al. (2023) for any server rule is ``SignAgreement``; given here, it multiplies the whole step.

    Args:
        p: Share of the clients that must agree, in [0, 1].
        server_lr: η_s, at least 0, the learning rate of the masked gradient.
        gradient_at: Where g_i is computed. ``start``: at the global model, over the client's full data (the paper's
            text). ``last_step``: in the last local step, on its minibatch; if each batch is all of a client's data,
            this is the paper's Algorithm 1, where an epoch is one step. ``end``: at the client's own model, over its
            full data.
        p_means: How p is read. ``formula``: |Σ sign(g_i)| >= p n, 90 % of the clients for p = 0.8. ``prose``:
            max(#+, #-) >= p n, 80 % of them.
        weighting: p_i before normalisation: s_i (``samples``, the paper's text), 1 (``uniform``), or 1 / s_i
            (``inverse``, lines 7 and 8 of its Algorithm 1).
        **kwargs: Options of every aggregator.
    """

    weightings = ("samples", "uniform", "inverse")

    def __init__(
        self,
        p: float = 0.8,
        server_lr: float = 0.1,
        gradient_at: Literal["start", "last_step", "end"] = "start",
        p_means: Literal["formula", "prose"] = "formula",
        weighting: Literal["samples", "uniform", "inverse"] = "samples",
        **kwargs: Any,
    ) -> None:
        # The base does not know `inverse`. Passed by keyword, so that the command line still finds the other options.
        super().__init__(weighting=cast(Any, weighting), **kwargs)
        self.p = expect_number("--aggregator.p", p, least=0, most=1)
        self.server_lr = expect_number("--aggregator.server_lr", server_lr, least=0)
        self.gradient_at = expect_choice("--aggregator.gradient_at", gradient_at, ("start", "last_step", "end"))
        self.p_means: Literal["formula", "prose"] = expect_choice("--aggregator.p_means", p_means, ("formula", "prose"))
        self.needs = Need.MEAN | Need.GRADIENT_MEAN | Need.GRADIENT_SIGN_SUM
        self._agreed: Tensor | None = None

    def client_weight(self, client: Client) -> float:
        return 1 / client.num_samples if self.weighting == "inverse" else super().client_weight(client)

    def on_client_end(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        """Counts votes for ``prose``: in the sum of signs, two opposed gradients look like two of zero."""
        if self.p_means == "prose" and update.gradient is not None:
            update.send("FedGMA", (update.gradient != 0).to(update.gradient), implied=True)

    def server_step(self, update: ReducedUpdate) -> Tensor:
        """Returns Δ - (η_s / η_g) M ⊙ Σ p_i g_i, shape (d,): η_g scales only Δ."""
        votes = update.sums.get("FedGMA")
        mask = gradient_and_mask(update.gradient_sign_sum, update.num_clients, self.p, self.p_means, votes)
        self._agreed = mask.mean()
        if self.server_lr == 0:
            return update.mean
        return torch.sub(update.mean, mask * update.gradient_mean, alpha=self.server_lr / self.lr_at(update.round))

    def step(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        super().step(trainer, pl_module, update)
        if self._agreed is not None:
            pl_module.log("fedgma/agreed", self._agreed)
