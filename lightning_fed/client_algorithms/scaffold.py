"""SCAFFOLD: control variates against client drift, kept between rounds or computed anew in each."""

from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import Client, ReducedUpdate, StartGradient, Update
from lightning_fed.errors import expect_choice
from lightning_fed.functional.clients import control_variate, difference, optimizer_distance

__all__ = ["SCAFFOLD", "StatelessSCAFFOLD"]


class _Corrected(ClientAlgorithm):
    """Adds one vector, the same in every step of a client, to its local gradients."""

    stacks = True
    adds_linear_term = True

    def check(self, trainer: TrainerLike) -> None:
        super().check(trainer)
        why = "as both add a client's own linear term and each would mistake the other's for a gradient"
        self.expect_no_linear_term(trainer, why)

    def on_before_optimizer_step(self, trainer: TrainerLike, pl_module: LightningModule, optimizer: Any) -> None:  # type: ignore[override]  # the trainer is ours
        trainer.vector.add_to_gradient(self.scratch("correction", trainer.weights))


class SCAFFOLD(_Corrected):
    """Adds c - c_i to every local gradient; each client keeps its c_i, and c is the mean of all clients' c_i.

    Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
    ICML 2020, Algorithm 1. After training c_i becomes ∇f_i(w) over the client's full data (option I) or
    c_i - c - δ_i / a_i (option II), where a_i = K_i η for plain SGD; momentum and schedules are simulated exactly, see
    ``sgd_distance``. Then c <- c + Σ q_i (c_i⁺ - c_i), with q_i = 1/N under the aggregator's ``weighting`` uniform
    (the paper) and s_i / Σ s_j over all clients under samples; N counts the clients that hold samples. In the first
    round all c_i are zero, and it is plain local training, bit for bit.

    Args:
        option: How c_i⁺ is computed: ``II`` from the update, which needs SGD; ``I`` by a pass over the client's data.

    Attributes:
        control: c, shape (d,), None before the first round.
    """

    vectors_down = 1

    def __init__(self, option: Literal["I", "II"] = "II") -> None:
        self.option = expect_choice("--client.option", option, ("I", "II"), of="SCAFFOLD")
        self.needs_distance = option == "II"
        self.control: Tensor | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self.control = None

    def start_gradients(self, round: int) -> StartGradient:
        return "client" if self.option == "I" else "none"

    def check(self, trainer: TrainerLike) -> None:
        """Refuses, under option II, a client optimizer other than SGD, because its distance is unknown."""
        super().check(trainer)
        if self.option == "II":
            optimizer_distance(trainer.optimizers[0], [], asked_by="--client.option")
        sizes = np.asarray(trainer.client_sizes)
        holders = np.flatnonzero(sizes).tolist()
        self._whole = sum(trainer.update_weight(Client(each, int(sizes[each]), trainer.round)) for each in holders)

    def on_round_start(self, trainer: TrainerLike, pl_module: LightningModule, cohort: Any) -> None:
        """Prepares c, which changes only at the end of the round."""
        if self.control is None:
            self.control = torch.zeros_like(trainer.weights)
        self.control = self.control.to(trainer.weights)

    def on_client_start(self, trainer: TrainerLike, pl_module: LightningModule, client: Client) -> None:
        assert self.control is not None
        own = self.scratch("own", trainer.weights)
        trainer.client_states.recall("SCAFFOLD", client.id, own)
        torch.sub(self.control, own, out=self.scratch("correction", own))

    def on_client_end(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        """Sends q_i (c_i⁺ - c_i)."""
        own, correction = self.scratch("own", trainer.weights), self.scratch("correction", trainer.weights)
        new = self.scratch("new", own)
        if self.option == "I":
            new.copy_(trainer.start_gradients.gradient)
        else:  # the local steps' own change: other callbacks may have changed the update
            moved = difference(trainer.vector.data, trainer.origin, new)
            control_variate(correction, moved, update.optimizer_distance, new)
        change = torch.sub(new, own, out=self.scratch("change", own))
        update.send("SCAFFOLD", change, trainer.update_weight(update.client) / self._whole)

    def on_client_entered(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        trainer.client_states.store("SCAFFOLD", update.client.id, self.scratch("new", trainer.weights))

    def on_after_server_step(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        assert self.control is not None
        self.control.add_(update.sums["SCAFFOLD"])

    def state_dict(self) -> dict[str, Any]:
        """Returns c; the clients' c_i are kept by ``trainer.client_states``."""
        return {} if self.control is None else {"control": self.control.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.control = state_dict["control"]


class StatelessSCAFFOLD(_Corrected):
    """Adds c - c_i to every local gradient, with c_i = ∇f_i(w) and c = Σ p_i c_i over the cohort, new in each round.

    Dandi, Barba, Jaggi, "Implicit Gradient Alignment in Distributed and Federated Learning", AAAI 2022, Algorithm 4.
    The gradients, over each client's full data, are exchanged before training: a second communication round. p_i are
    the aggregator's weights. In a round with one client it is plain local training.
    """

    def start_gradients(self, round: int) -> StartGradient:
        return "cohort"

    def on_client_start(self, trainer: TrainerLike, pl_module: LightningModule, client: Client) -> None:
        start = trainer.start_gradients
        difference(start.mean, start.gradient, self.scratch("correction", trainer.weights))
