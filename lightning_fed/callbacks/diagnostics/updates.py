"""Logs the updates of a round: lengths and directions, and how far clients agree on the sign of each coordinate."""

import csv
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_fed.core.files import WriteError, append_whole, csv_text, write_atomically
from lightning_fed.core.hooks import FederatedCallback, TrainerLike
from lightning_fed.core.updates import Cohort, Need, ReducedUpdate, Update
from lightning_fed.errors import expect_count, expect_number
from lightning_fed.functional.geometry import direction_cosines
from lightning_fed.functional.masks import agreement, coin_flip_votes, sign_agreement_mask, vote_threshold

__all__ = ["RoundTable", "UpdateAgreement", "UpdateGeometry"]

_BINS = 20


class RoundTable:
    """A CSV file whose first column is the round. If it cannot be written, you are warned once and the run goes on.

    Args:
        path: The file.
        head: Names of the columns after ``round``.
        finished: Index of the last finished round. Rows of later rounds, left by a run that died after its checkpoint,
            are removed.
    """

    def __init__(self, path: Path, head: Sequence[str], finished: int) -> None:
        self.path, self._refused = path, False
        kept: list[list[str]] = []
        if finished and path.is_file():
            with path.open(newline="", errors="replace") as file:
                rows = list(csv.reader(file))[1:]
            kept = [row for row in rows if row and row[0].isdigit() and int(row[0]) <= finished]
        self._write(lambda: write_atomically(path, csv_text([["round", *head], *kept]).encode()))

    def append(self, round: int, rows: Iterable[Sequence[Any]]) -> None:
        """Appends the rows of a round."""
        self._write(lambda: append_whole(self.path, csv_text([round, *row] for row in rows).encode()))

    def _write(self, write: Any) -> None:
        if self._refused:
            return
        try:
            write()
        except WriteError as error:
            self._refused = True
            rank_zero_warn(f"The run goes on without {self.path.name}: {error}")


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


class UpdateAgreement(FederatedCallback):
    """Logs A = |(1/n) Σ_i sign(δ_i)| over the clients that entered the round, and the effect of a mask on it.

    m is the mask of gradient masked averaging with a threshold τ (Tenison et al., TMLR 2023, eq. 3): 1 where A >= τ, A
    elsewhere. The run itself may use this mask, another one or none. Training is the same with and without the
    callback, bit for bit.

    Logs ``agreement/mean`` (of A over all coordinates), ``agreement/below`` (share of A < τ, as in figure 4),
    ``agreement/below_by_chance`` (that share if each sign were a fair coin flip: the binomial distribution of n
    votes, which have equal weight whatever the weights of the mean),
    ``agreement/mask`` (mean of m), with Δ the mean update ``agreement/through`` (‖m ⊙ Δ‖ / ‖Δ‖),
    ``agreement/progress`` (⟨m ⊙ Δ, Δ⟩ / ‖Δ‖²) and ``agreement/cos`` (of the angle between m ⊙ Δ and Δ; progress is
    through times cos), each 1 where it would be 0 / 0,
    ``agreement/overlap`` (intersection over union of the sets A >= τ of this measurement and the last) and
    ``agreement/least`` (the mean of m so far at the coordinate where it is least: an estimate of α = inf_j E[m_j] in
    proposition 4.8). By layer, for each parameter NAME: ``agreement/mean/NAME`` and ``agreement/below/NAME``.

    Args:
        threshold: τ in [0, 1].
        every_n_rounds: Rounds between measurements, at least 1.
        by_layer: Whether to log columns for each parameter.

    Attributes:
        histogram: Coordinates counted by A at the last measurement, in 20 bins of equal width over [0, 1]; the last bin
            includes 1. None before the first.
        coin_flips: The shares of coordinates in these bins if each sign were a fair coin flip.
    """

    needs = Need.SIGN_SUM | Need.MEAN

    def __init__(self, threshold: float = 0.4, every_n_rounds: int = 1, by_layer: bool = False) -> None:
        name = type(self).__name__
        self.threshold = expect_number("threshold", threshold, least=0, most=1, of=name)
        self.every_n_rounds = expect_count("every_n_rounds", every_n_rounds, of=name)
        self.by_layer = by_layer
        self._forget()

    def _forget(self) -> None:
        self._agreed: Tensor | None = None
        self._total: Tensor | None = None
        self._measured = 0
        self.histogram: Tensor | None = None
        self.coin_flips: Tensor | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._forget()

    def on_before_server_step(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        if trainer.round % self.every_n_rounds or not update.num_clients:
            return
        clients, flips = update.num_clients, coin_flip_votes(update.num_clients)
        share = agreement(update.sign_sum, clients)
        mask = sign_agreement_mask(update.sign_sum, clients, self.threshold)
        self.histogram = _bins_of(update.sign_sum, clients).bincount(minlength=_BINS)
        self.coin_flips = _bins_of(torch.arange(clients + 1.0), clients).bincount(flips, _BINS)
        agreed = mask == 1  # m is below 1 exactly where A < τ
        self._total = mask.clone() if self._total is None else self._total.to(mask.device).add_(mask)
        self._measured += 1
        length, masked = torch.linalg.vector_norm(update.mean), mask * update.mean
        through = torch.linalg.vector_norm(masked) / length
        progress = (masked * update.mean).sum() / length**2
        logged = {
            "agreement/mean": share.mean(),
            "agreement/below": 1 - agreed.to(share.dtype).mean(),
            "agreement/below_by_chance": flips[: vote_threshold(self.threshold, clients)].sum().item(),
            "agreement/mask": mask.mean(),
            "agreement/through": torch.where(length > 0, through, 1.0),
            "agreement/progress": torch.where(length > 0, progress, 1.0),
            "agreement/cos": torch.where(through > 0, progress / through, 1.0),
            "agreement/least": self._total.min() / self._measured,
        }
        if self._agreed is not None:
            former = self._agreed.to(agreed.device)  # on the CPU if it is from a checkpoint
            either, both = (found.sum().to(share.dtype) for found in (agreed | former, agreed & former))
            logged["agreement/overlap"] = torch.where(either > 0, both / either, 1.0)
        self._agreed = agreed
        if self.by_layer:
            vector = trainer.vector
            for name, part in zip(vector.names, vector.places().values(), strict=True):
                logged[f"agreement/mean/{name}"] = share[part].mean()
                logged[f"agreement/below/{name}"] = 1 - agreed[part].to(share.dtype).mean()
        pl_module.log_dict(logged)

    def state_dict(self) -> dict[str, Any]:
        return {"agreed": self._agreed, "total": self._total, "measured": self._measured}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._agreed, self._total = state_dict["agreed"], state_dict["total"]
        self._measured = state_dict["measured"]


def _bins_of(votes: Tensor, num_clients: int) -> Tensor:
    """Returns the bin of each |Σ_i sign(δ_i)|; these are integers, so the bins' edges are exact."""
    return (votes.abs() * _BINS / num_clients).long().clamp_(max=_BINS - 1)
