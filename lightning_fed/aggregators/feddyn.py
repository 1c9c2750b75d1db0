"""The server's half of FedDyn."""

from typing import Any, Literal

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_fed.aggregators.base import StatefulAggregator
from lightning_fed.core.updates import ReducedUpdate
from lightning_fed.errors import FederatedError, expect_number
from lightning_fed.functional.server import feddyn_step

__all__ = ["FedDynServer"]


class FedDynServer(StatefulAggregator):
    """Adds the mean update and the sum of earlier ones: h <- h - α (1/N) Σ δ_i; w <- w + η_g ((1/n) Σ δ_i - h/α).

    Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, Algorithm 1, for clients that minimise
    f_i(θ) - ⟨h_i, θ⟩ + (α/2)‖θ - w‖² with h_i <- h_i - α (w_i - w): h is the mean of the h_i over the N clients that
    hold samples. The first step from zero is (1 + n/N) times the mean update, so no α gives FedAvg. A mask with
    ``apply`` before changes h too; h is then not the mean of the h_i.

    Args:
        alpha: α above 0; the client algorithm ``FedDyn`` uses the same.
        weighting: Only ``uniform``: the method gives every client the same weight.
        **kwargs: Options of every aggregator.
    """

    def __init__(self, alpha: float = 0.1, weighting: Literal["samples", "uniform"] = "uniform", **kwargs: Any) -> None:
        super().__init__(weighting=weighting, **kwargs)
        self.alpha = expect_number("--aggregator.alpha", alpha, above=0)
        if weighting != "uniform":
            raise FederatedError(
                f"Expected `--aggregator.weighting` to be uniform for {type(self).__name__}, got {weighting}: its "
                "state is the unweighted mean over all clients, leave the option out."
            )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        halves = [getattr(callback, "server_half", None) for callback in trainer.callbacks]
        if not any(half is not None and isinstance(self, half) for half in halves):
            rank_zero_warn(
                "FedDynServer without the clients' half adds up all earlier updates, a momentum without decay: set "
                "`--client FedDyn`."
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns h and α, because h is a multiple of α."""
        return {**super().state_dict(), "alpha": self.alpha}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned; refuses another α, as h and the clients' h_i are multiples of it."""
        alpha = state_dict.get("alpha", self.alpha)
        if alpha != self.alpha:
            raise FederatedError(
                f"Expected `--aggregator.alpha {alpha}`, as in the checkpoint's run, got {self.alpha}: give the "
                "same value, or start a new run with `--weights` instead of `--ckpt_path`."
            )
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "alpha"})

    def server_step(self, update: ReducedUpdate) -> Tensor:
        step, self.vectors["h"] = feddyn_step(
            update.mean, self.recall("h", update.mean), self.alpha, update.num_clients, update.num_registered
        )
        return step
