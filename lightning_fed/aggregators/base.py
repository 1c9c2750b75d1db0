"""The bases of aggregators: callbacks that step the global model at the end of a round."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.core.hooks import FederatedCallback, TrainerLike
from lightning_fed.core.updates import ByRound, Client, Need, ReducedUpdate, StartGradient, at_round
from lightning_fed.errors import FederatedError, expect_choice, expect_number
from lightning_fed.masks import Mask

__all__ = ["Aggregator", "StatefulAggregator"]


class Aggregator(FederatedCallback, ABC):
    """Steps the global vector by the cohort's updates: w <- w + η_g m ⊙ u.

    A subclass lists in ``needs`` what it needs of the cohort, and returns u from ``server_step``. Learning rate, mask,
    weights and buffers are handled here. Server state is saved by ``state_dict`` and ``load_state_dict``.

    Args:
        lr: η_g, the server learning rate, above 0; or such numbers by the first round of each, ``{1: 1, 50: 0.1}``.
        mask: m; None for no mask.
        weighting: The p_i: ``samples`` (p_i ∝ s_i) or ``uniform`` (1/n). They sum to 1 over the clients that entered.
        buffers: How the clients' buffers (BatchNorm statistics) are combined. ``average``: floating-point buffers are
            averaged with p_i, integer ones take the maximum. ``local``: each client keeps its own buffers between its
            rounds (SiloBN, Andreux et al., 2020: γ and β are averaged); the global model keeps its initial ones.
            ``keep``: every client starts from the global model's buffers, which never change.
        apply: Whether the mask multiplies the rule's step (``after``, our reading of the paper) or the pseudo-gradient
            that the rule gets (``before``).

    Attributes:
        needs: What the rule needs of the cohort.
        gradient_at: Where g_i is computed, if gradients are needed: at ``start`` or ``end`` of local training, over the
            client's full data, or in the ``last_step``, on its minibatch.
        losses_at: Where f_i is computed, if losses are needed: at w (``start``), or at w_i (``end``).
        losses_over: The samples of f_i: the client's training samples (``train``), or those that the data hold out of
            them for validation (``held_out``).
        mask_refusal: Why the rule takes no mask; None if it takes one.
        vectors_down: Vectors of length d that a client gets in a round for the rule, besides the model.
        ahead: What the rule adds to w before clients get it, set in ``on_round_start``, shape (d,); None for nothing.
        min_clients: The fewest clients that the rule needs in a round.
        weightings: The values that ``weighting`` may have.
        weighs_updates: Whether the p_i weigh the updates; if not, they weigh only the buffers.
    """

    needs: Need = Need.MEAN
    gradient_at: Literal["start", "end", "last_step"] = "start"
    losses_at: Literal["start", "end"] = "start"
    losses_over: Literal["train", "held_out"] = "train"
    mask_refusal: str | None = None
    vectors_down: int = 0
    ahead: Tensor | None = None
    min_clients: int = 1
    weightings: tuple[str, ...] = ("samples", "uniform")
    weighs_updates: bool = True

    def __init__(
        self,
        lr: ByRound = 1.0,
        mask: Mask | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
        buffers: Literal["average", "local", "keep"] = "average",
        apply: Literal["after", "before"] = "after",
    ) -> None:
        self.lr = expect_number("--aggregator.lr", lr, above=0, by_round=True)
        self.weighting: str = expect_choice("--aggregator.weighting", weighting, self.weightings)
        self.buffers = expect_choice("--aggregator.buffers", buffers, ("average", "local", "keep"))
        self.apply = expect_choice("--aggregator.apply", apply, ("after", "before"))
        if mask is not None and not isinstance(mask, Mask):
            raise FederatedError(
                f"Expected `--aggregator.mask` to be a Mask, such as SignAgreement, got {type(mask).__name__}."
            )
        if mask is not None and self.mask_refusal is not None:
            raise FederatedError(
                f"Expected no mask over {type(self).__name__}, got {type(mask).__name__}: {self.mask_refusal}; leave "
                "out `--aggregator.mask`."
            )
        if mask is not None and apply == "before" and not self.needs & (Need.MEAN | Need.NORMALIZED_MEAN):
            raise FederatedError(
                f"Expected `--aggregator.apply after` for {type(self).__name__}, got before: the rule does "
                "not use the mean update, which the mask would multiply."
            )
        self.mask = mask

    @abstractmethod
    def server_step(self, update: ReducedUpdate) -> Tensor:
        """Computes u, the rule's step before mask and learning rate.

        Args:
            update: The cohort's reduced update, with what ``needs`` lists; do not change its tensors.

        Returns:
            u, shape (d,).
        """

    def check_cohort(self, num_clients: int) -> None:  # noqa: B027  # most rules take any cohort
        """Refuses a round of ``num_clients`` clients if the rule's options need more."""

    def client_figures(self) -> dict[str, Tensor]:
        """Returns figures of the last step for the clients that entered, each (n,) or empty, by name in tables."""
        return {}

    def start_gradients(self, round: int) -> StartGradient:
        return "client" if self.all_needs & Need.ANY_GRADIENT and self.gradient_at == "start" else "none"

    def lr_at(self, round: int) -> float:
        """Returns η_g of a round."""
        return at_round(self.lr, round)

    @property
    def all_needs(self) -> Need:
        """What the rule and its mask need together."""
        return self.needs | (self.mask.needs if self.mask is not None else Need.NOTHING)

    @property
    def reads_start_losses(self) -> bool:
        """Whether it needs f_i(w) over training samples, which a gradient taken there gives too."""
        return bool(self.all_needs & Need.ANY_LOSS) and (self.losses_at, self.losses_over) == ("start", "train")

    @property
    def label(self) -> str:
        """A short name for tables and plots, such as ``FedAvg+SignAgreement``."""
        return "+".join(type(part).__name__ for part in (self, self.mask) if part is not None)

    def client_weight(self, client: Client) -> float:
        """Returns the weight of a client before normalisation: s_i or 1."""
        return float(client.num_samples) if self.weighting == "samples" else 1.0

    @property
    def by_samples(self) -> bool:
        """Whether clients are weighted by their samples, in the step and in what client algorithms exchange."""
        return self.weighs_updates and self.weighting != "uniform"

    def update_weight(self, client: Client) -> float:
        """Returns a client's weight in the step before normalisation; 1 if the rule does not weigh updates."""
        return self.client_weight(client) if self.weighs_updates else 1.0

    def step(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        """Steps ``trainer.weights`` in place; the mask is computed from the raw updates."""
        if self.mask is None:
            step = self.server_step(update)
        else:
            step = self._masked_step(self.mask, trainer, pl_module, update)
        trainer.weights.add_(step, alpha=self.lr_at(update.round))

    def _masked_step(
        self, mask: Mask, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate
    ) -> Tensor:
        """Computes the mask and the masked step, and logs the mask's diagnostics."""
        mask.seed, mask.names = trainer.seed, trainer.vector.names
        mask.prepare([p.numel() for p in trainer.vector.parameters])
        factors = mask.compute(update)
        pl_module.log_dict(mask.diagnose(update, factors))
        if self.apply == "after":
            return mask.over(self.server_step(update), factors)
        means = {name: getattr(update, name) for name in ("mean", "normalized_mean")}
        masked: dict[str, Any] = {name: mask.over(value, factors) for name, value in means.items() if value.numel()}
        return self.server_step(replace(update, **masked))


class StatefulAggregator(Aggregator):
    """Keeps server state: vectors by name, most of shape (d,), reset by a new ``fit`` and saved in checkpoints.

    Attributes:
        vectors: The state after the last round; empty before the first.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vectors: dict[str, Tensor] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self.vectors = {}

    def recall(self, name: str, like: Tensor, initial: float = 0.0) -> Tensor:
        """Returns a vector of the state, filled with ``initial`` before the first round.

        Args:
            name: Name of the vector.
            like: Tensor of shape (d,); the vector gets its dtype and device, as checkpoints load on the CPU.
            initial: Value of every element before the first round.
        """
        kept = self.vectors.get(name)
        return torch.full_like(like, initial) if kept is None else kept.to(like)

    def state_dict(self) -> dict[str, Any]:
        return {name: vector.clone() for name, vector in self.vectors.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.vectors = dict(state_dict)
