"""Losses that compare the live model with the global one on the batch: MOON, FedNTD."""

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.client_algorithms.losses.base import LossAlgorithm, LossCall, feature_layer
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import Client, Update
from lightning_fed.errors import FederatedError, expect_number
from lightning_fed.functional.losses import contrastive_loss, not_true_divergence

__all__ = ["MOON", "FedNTD"]


class MOON(LossAlgorithm):
    """Adds μ times a contrastive term: features towards the global model's, away from the client's last model's.

    Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021. The last model is the client's trained
    w_i of its former round; in its first round it is the global one, and the term has no gradient. It costs two forward
    passes in each step. μ = 0 is plain local training, bit for bit.

    Args:
        mu: μ, at least 0. The paper tunes it over 0.1, 1, 5, 10.
        temperature: τ above 0. The paper takes 0.5.
        layer: Name of the layer whose input is the representation, the last linear layer if left out.
    """

    stacks = True

    def __init__(self, mu: float = 1.0, temperature: float = 0.5, layer: str | None = None) -> None:
        self.mu = expect_number("--client.mu", mu, least=0, of="MOON")
        self.temperature = expect_number("--client.temperature", temperature, above=0, of="MOON")
        self.layer = layer

    @property
    def active(self) -> bool:
        return self.mu > 0

    def check(self, trainer: TrainerLike) -> None:
        super().check(trainer)
        if not self.active:
            return
        own = {id(p) for p in feature_layer(trainer.lightning_module, self.layer).parameters()}
        if all(id(p) in own for p in trainer.vector.parameters):
            raise FederatedError(
                f"Expected {type(trainer.lightning_module).__name__} to train layers before the one whose input MOON "
                "compares, got none: name a later layer as `--client.layer`, or leave MOON out of `--client`."
            )

    def prepare(self, trainer: TrainerLike, client: Client) -> dict[str, Tensor]:
        last = self.scratch("last", trainer.weights)
        if not trainer.client_states.recall("MOON", client.id, last):
            last.copy_(trainer.received)
        return {"last": last}

    def term(self, call: LossCall, own: dict[str, Tensor]) -> Tensor:
        live, pulls, pushes = (
            each.features[self.layer] for each in (call, call.at(call.weights), call.at(own["last"]))
        )
        return self.mu * contrastive_loss(live, pulls, pushes, self.temperature)

    def on_client_entered(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        if self.active:
            trainer.client_states.store("MOON", update.client.id, trainer.vector.data)


class FedNTD(LossAlgorithm):
    """Adds β times the divergence between the global model's and the live probabilities of the untrue classes.

    Lee, Jeong, Shin, Bae, Yun, "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning",
    NeurIPS 2022. It costs a forward pass in each step. β = 0 is plain local training, bit for bit.

    Args:
        beta: β, at least 0. The authors take 1.
        temperature: τ above 0. The authors take 1.
    """

    stacks = True

    def __init__(self, beta: float = 1.0, temperature: float = 1.0) -> None:
        self.beta = expect_number("--client.beta", beta, least=0, of="FedNTD")
        self.temperature = expect_number("--client.temperature", temperature, above=0, of="FedNTD")

    @property
    def active(self) -> bool:
        return self.beta > 0

    def term(self, call: LossCall, own: dict[str, Tensor]) -> Tensor:
        if not isinstance(call.output, Tensor) or call.output.ndim < 2:
            raise FederatedError(
                "Expected `self(x)` to return scores (B, C) for FedNTD, got "
                f"{type(call.output).__name__}: return one score per class from `forward`."
            )
        teacher = call.at(call.weights).output
        return self.beta * not_true_divergence(call.output, teacher, call.labels, self.temperature)
