"""Logs the lengths of a round's updates, and how far they point in the same direction."""

from itertools import zip_longest
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.callbacks.diagnostics.round_table import RoundTable
from lightning_fed.core.hooks import FederatedCallback, TrainerLike
from lightning_fed.core.updates import Cohort, Need, ReducedUpdate, Update
from lightning_fed.errors import expect_count
from lightning_fed.functional.geometry import direction_cosines

__all__ = ["UpdateGeometry"]


class UpdateGeometry(FederatedCallback):
    """Logs lengths and angles of the updates δ_i of the clients that entered the round, and of their mean Δ.

    Cosines need no matrix of all updates, only the sum of their directions: see ``direction_cosines``. Training is the
    same with and without the callback, bit for bit.

    Logs ``update/norm`` and ``update/norm_max`` (mean and maximum of ‖δ_i‖), ``update/norm_mean`` (‖Δ‖, with the
    aggregator's weights), ``update/cosine`` (mean over pairs of clients with a nonzero update, if there are two),
    ``update/cosine_to_mean``, and ``update/step``, the length of the server's step ‖w_new - w‖.

    With ``by_client`` the file ``updates.csv`` in the run's folder gets ‖δ_i‖ of each client and round (``norm``), and
    figures of the aggregator, such as CGW's x_i (``cgw_weight``), m_i (``cgw_product``) and sign (``cgw_sign``).

    Args:
        every_n_rounds: Rounds between measurements, at least 1.
        by_client: Whether each client's figures are written to a table.
    """

    needs = Need.MEAN
    stacks = True

    def __init__(self, every_n_rounds: int = 1, by_client: bool = False) -> None:
        self.every_n_rounds = expect_count("every_n_rounds", every_n_rounds, of=type(self).__name__)
        self.by_client = by_client
        self._table: RoundTable | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._table = None
        if self.by_client and trainer.is_global_zero and trainer.run is not None:
            head = ["client", "norm", *trainer.aggregator.client_figures()]
            self._table = RoundTable(trainer.run.path / "updates.csv", head, trainer.round)

    def on_round_start(self, trainer: TrainerLike, pl_module: LightningModule, cohort: Cohort) -> None:
        self._due = trainer.round % self.every_n_rounds == 0
        if self._due:
            self._directions = torch.zeros_like(trainer.weights)
            self._norms: dict[int, Tensor] = {}

    def on_client_entered(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        if self._due:
            norm = torch.linalg.vector_norm(update.delta)
            self._directions.add_(torch.where(norm > 0, update.delta / norm, 0.0))
            self._norms[update.client.id] = norm

    def on_before_server_step(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        if not self._due or not update.num_clients:
            return
        none = self._directions.new_zeros(())  # for a client that another process trains
        norms = trainer.reduce_sum(torch.stack([self._norms.get(client.id, none) for client in update.clients]))
        directions = trainer.reduce_sum(self._directions)
        between, to_mean = direction_cosines(directions, (norms > 0).sum(), update.mean)
        logged = {
            "update/norm": norms.mean(),
            "update/norm_max": norms.max(),
            "update/norm_mean": torch.linalg.vector_norm(update.mean),
            "update/cosine_to_mean": to_mean,
        }
        if update.num_clients > 1:
            logged["update/cosine"] = between
        pl_module.log_dict(logged)
        self._before, self._lengths = trainer.weights.clone(), norms

    def on_after_server_step(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        if self._due and update.num_clients:
            pl_module.log("update/step", torch.linalg.vector_norm(trainer.weights - self._before))
            del self._before
            if self._table is not None:
                figures = [values.tolist() for values in trainer.aggregator.client_figures().values()]
                columns = [[client.id for client in update.clients], self._lengths.tolist(), *figures]
                self._table.append(trainer.round, zip_longest(*columns, fillvalue=""))
