"""Logs how far clients differ: in their gradients, and in how good the model is beyond those it was trained on."""

from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.core.hooks import FederatedCallback, TrainerLike
from lightning_fed.core.updates import Client, Cohort, ReducedUpdate, StartGradient
from lightning_fed.errors import FederatedError, expect_choice, expect_count
from lightning_fed.functional.geometry import gradient_spread

__all__ = ["DistributionGap", "GradientDissimilarity"]

_OWN = ("clients", "test")


class GradientDissimilarity(FederatedCallback):
    """Logs r(w) = (1/2n) Σ ‖∇f_i(w) - ∇f(w)‖² over the cohort, at the model w that the round starts from.

    ∇f_i is the gradient over client i's full data and ∇f their mean. Dandi, Barba, Jaggi, "Implicit Gradient Alignment
    in Distributed and Federated Learning", AAAI 2022, section 3 and figures 5, 7 and 9. Training is the same with and
    without it, bit for bit, and no communication is counted. Gradients that an algorithm needs too are computed
    once. A client whose gradient is not finite is left out.

    Logs ``gradient/dissimilarity`` (r), ``gradient/distance`` and ``gradient/distance_max`` (mean over the clients and
    maximum of ‖∇f_i - ∇f‖), ``gradient/norm`` (‖∇f‖) and, for a chosen client in rounds that draw it,
    ``gradient/distance_client``.

    Args:
        every_n_rounds: Rounds between measurements, at least 1.
        weighting: Weights of all means: ``uniform`` (1/n, as in the paper) or ``samples`` (p_i ∝ s_i).
        client: Id of a client whose own distance is logged; None for none. The paper's figures show client 0.
        over: Whether f is over the ``cohort`` or over ``all`` clients that hold samples, as in the paper's figures.
            With ``all`` every process computes all gradients, and holds them while it compares them.
    """

    def __init__(
        self,
        every_n_rounds: int = 1,
        weighting: Literal["uniform", "samples"] = "uniform",
        client: int | None = None,
        over: Literal["cohort", "all"] = "cohort",
    ) -> None:
        name = type(self).__name__
        self.every_n_rounds = expect_count("every_n_rounds", every_n_rounds, of=name)
        self.weighting = expect_choice("weighting", weighting, ("uniform", "samples"), of=name)
        self.over = expect_choice("over", over, ("cohort", "all"), of=name)
        self.client = client
        self._found: dict[str, Tensor] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit" and self.client is not None and not 0 <= self.client < len(trainer.client_sizes):
            raise FederatedError(
                f"Expected `client` of {type(self).__name__} to be an id in [0, {len(trainer.client_sizes)}), got "
                f"{self.client}."
            )

    def start_gradients(self, round: int) -> StartGradient:
        return "cohort" if round % self.every_n_rounds == 0 and self.over == "cohort" else "none"

    def on_round_start(self, trainer: TrainerLike, pl_module: LightningModule, cohort: Cohort) -> None:
        """Measures over all clients, before any of them trains."""
        self._found = {}
        if trainer.round % self.every_n_rounds or self.over == "cohort":
            return
        holders = np.flatnonzero(trainer.client_sizes).tolist()
        clients = tuple(Client(each, int(trainer.client_sizes[each]), trainer.round) for each in holders)
        rows = trainer.weights.new_empty(len(clients), trainer.weights.numel())
        trainer.start_gradients.look_at(clients, rows)
        self._found = self._measure(clients, rows)

    def on_before_server_step(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        """Logs in rounds with a measurement, over all clients that were drawn, also those that diverged since."""
        if self.start_gradients(trainer.round) == "cohort":
            start = trainer.start_gradients
            self._found = self._measure(start.clients, start.rows)
        pl_module.log_dict(self._found)

    def _measure(self, asked: tuple[Client, ...], rows: Tensor) -> dict[str, Tensor]:
        """Returns the values to log, from the gradients that are finite."""
        finite = torch.linalg.vector_norm(rows, dim=1).isfinite()
        clients = [client for client, good in zip(asked, finite.tolist(), strict=True) if good]
        if not clients:
            return {}
        rows = rows if len(clients) == len(asked) else rows[finite]
        sizes = [client.num_samples if self.weighting == "samples" else 1 for client in clients]
        shares = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
        spread = gradient_spread(rows, shares)
        distances = spread.distances.cpu()
        logged = {
            "gradient/dissimilarity": spread.dissimilarity,
            "gradient/distance": shares @ distances.double(),
            "gradient/distance_max": distances.max(),
            "gradient/norm": spread.norm,
        }
        ids = [client.id for client in clients]
        if self.client in ids:
            logged["gradient/distance_client"] = distances[ids.index(self.client)]
        return logged


class DistributionGap(FederatedCallback):
    """Logs, for each test metric, its value on the reference set minus its value on each other test set.

    For example, ``gap/acc/unseen`` is ``test/acc/test`` minus ``test/acc/unseen``. Rounds without a test have no value
    in such columns.

    Args:
        reference: Name of the in-distribution test set; by default ``clients`` if there is one, else ``test``.
    """

    def __init__(self, reference: str | None = None) -> None:
        self.reference = reference

    def on_test_epoch_end(self, trainer: TrainerLike, pl_module: LightningModule) -> None:  # type: ignore[override]  # the trainer is ours
        """Logs the gaps, once all sets have been evaluated."""
        metrics: dict[str, Any] = trainer.callback_metrics  # type: ignore[attr-defined]  # named as in Lightning
        named = {tuple(parts[1:]): value for name, value in metrics.items() if len(parts := name.split("/")) == 3
                 and parts[0] == "test"}  # fmt: skip
        sets = {where for _, where in named}
        own = self.reference or next((name for name in _OWN if name in sets), None)
        if own not in sets or len(sets) < 2:
            raise FederatedError(
                f"Expected several test sets for {type(self).__name__}, one of them {own or ' or '.join(_OWN)}, got "
                f"{', '.join(sorted(sets)) or 'one without a name'}: set `reference` to the in-distribution one, or "
                "leave the callback out."
            )
        for (metric, where), value in named.items():
            if where != own and (metric, own) in named:
                pl_module.log(f"gap/{metric}/{where}", named[metric, own] - value)
