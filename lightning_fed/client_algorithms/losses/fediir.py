"""FedIIR: gradients of the last layer that differ little between clients."""

from typing import Any

import torch
from torch import Tensor

from lightning_fed.client_algorithms.losses.base import LossAlgorithm, LossCall, feature_layer
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import Client, StartGradient
from lightning_fed.errors import FederatedError, expect_number

__all__ = ["FedIIR"]


class FedIIR(LossAlgorithm):
    """Adds γ ‖∇_h f_i - ḡ‖², ∇_h f_i the gradient of the batch's loss with respect to the last layer h at w_i.

    Guo, Guo, Cao, Wu, Chang, "Out-of-Distribution Generalization of Federated Learning via Implicit Invariant
    Relationships", ICML 2023. ḡ <- ε ḡ + (1 - ε) Σ p_i ∇_h f_i(w), from zero, as the authors' code has it: gradients at
    w over the clients' full data are exchanged before training, a second communication round. Its gradient takes a
    second backward pass through the last layer's. γ = 0 is plain local training, bit for bit.

    Args:
        gamma: γ, at least 0. The authors take 0.001.
        ema: ε in [0, 1). The authors take 0.95.
        layer: Name of the layer h, the last linear layer if left out.

    Attributes:
        mean: ḡ, shape (d_h,), None before the first round.
    """

    stacks = True

    def __init__(self, gamma: float = 1e-3, ema: float = 0.95, layer: str | None = None) -> None:
        self.gamma = expect_number("--client.gamma", gamma, least=0, of="FedIIR")
        self.ema = expect_number("--client.ema", ema, least=0, below=1, of="FedIIR")
        self.layer = layer
        self.mean: Tensor | None = None
        self._round: int | None = None

    @property
    def active(self) -> bool:
        return self.gamma > 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self.mean = self._round = None

    def start_gradients(self, round: int) -> StartGradient:
        return "cohort" if self.active else "none"

    def check(self, trainer: TrainerLike) -> None:
        super().check(trainer)
        places = {id(p): place for p, place in trainer.vector.places().items()}
        own = list(feature_layer(trainer.lightning_module, self.layer).parameters())
        if not own or any(id(p) not in places for p in own):
            raise FederatedError(
                "Expected the layer whose gradients FedIIR compares to be trained and shared, but it is not: name "
                "another one as `--client.layer`."
            )
        self._places = [places[id(p)] for p in own]

    def _move_mean(self, trainer: TrainerLike) -> None:
        """Takes the gradients of the round into ḡ, once."""
        if self._round == trainer.round or not trainer.start_gradients.clients:
            return
        self._round, new = trainer.round, torch.cat([trainer.start_gradients.mean[place] for place in self._places])
        old = torch.zeros_like(new) if self.mean is None else self.mean.to(new)
        self.mean = self.ema * old + (1 - self.ema) * new

    def prepare(self, trainer: TrainerLike, client: Client) -> dict[str, Tensor]:
        """Gets ḡ ready, the same for all clients of the round."""
        self._move_mean(trainer)
        return {}

    def term(self, call: LossCall, own: dict[str, Tensor]) -> Tensor:
        assert self.mean is not None
        parameters = list(call.layer(self.layer).parameters())
        found = torch.autograd.grad(call.loss, parameters, create_graph=True, allow_unused=True)
        if any(part is None for part in found):
            raise FederatedError(
                "Expected the loss to depend on the layer whose gradients FedIIR compares, but it does not: name "
                "another one as `--client.layer`."
            )
        gradient = torch.cat([part.flatten() for part in found])
        return self.gamma * (gradient - self.mean).square().sum()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Moves ḡ on in a process that trained no client of the round, whether or not one has entered elsewhere."""
        self._move_mean(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.mean is None else {"mean": self.mean.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.mean = state_dict.get("mean")
