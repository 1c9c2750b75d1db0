"""Losses of local steps: by a client's classes, beside the global model's, by gradients of the last layer."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional as F

from lightning_fed.client_algorithms.losses.base import LossAlgorithm, LossCall, feature_layer
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import Client, StartGradient, Update
from lightning_fed.errors import FederatedError, expect_number
from lightning_fed.functional.clients import (
    calibration_margins,
    contrastive_loss,
    log_priors,
    not_true_divergence,
    restricted_factors,
)

__all__ = ["FedIIR", "FedLC", "FedNTD", "FedRS", "LogitAdjustment", "MOON"]


class _ByCounts(LossAlgorithm, ABC):
    """Changes the scores of each class by how many samples of it the client has."""

    stacks = True

    @abstractmethod
    def change(self, scores: Tensor, counts: Tensor) -> Tensor:
        """Returns changed scores, shape (B, C, ...), for counts that are laid out along their classes."""

    def check(self, trainer: TrainerLike) -> None:
        super().check(trainer)
        self.expect_labels(trainer)

    def prepare(self, trainer: TrainerLike, client: Client) -> dict[str, Tensor]:
        return {"counts": self.class_counts(trainer, client)}

    def logits(self, output: Any, own: dict[str, Tensor]) -> Tensor:
        """Changes scores (B, C, ...); a class that the data do not know has no samples."""
        counts = own["counts"]
        if not isinstance(output, Tensor) or output.ndim < 2 or output.shape[1] < len(counts):
            got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
            raise FederatedError(
                f"Expected `self(x)` to return scores (B, C) of the {len(counts)} classes of the data for "
                f"{type(self).__name__}, got {got}: return one score per class from `forward`."
            )
        counts = F.pad(counts, (0, output.shape[1] - len(counts))).view(-1, *[1] * (output.ndim - 2))
        return self.change(output, counts)


class FedLC(_ByCounts):
    """Subtracts τ n_c^{-1/4} from the score of class c in training, n_c the client's own samples of it.

    Zhang, Li, Li, Xu, Wu, Ding, Wu, "Federated Learning with Label Distribution Skew via Logits Calibration", ICML
    2022. The rarer a class is at the client, the larger the margin that training makes for it. τ = 0 is plain
    local training, bit for bit.

    Args:
        tau: τ, at least 0.
        absent: Samples that a class without any counts for. With 0 its margin is infinite, as in the formula: it leaves
            the softmax, and its row of the last layer is not trained.
    """

    def __init__(self, tau: float = 1.0, absent: float = 0.0) -> None:
        self.tau = expect_number("--client.tau", tau, least=0, of="FedLC")
        self.absent = expect_number("--client.absent", absent, least=0, of="FedLC")

    @property
    def active(self) -> bool:
        return self.tau > 0

    def change(self, scores: Tensor, counts: Tensor) -> Tensor:
        return scores + calibration_margins(counts, self.tau, self.absent).to(scores.dtype)


class LogitAdjustment(_ByCounts):
    """Adds τ log p_c to the score of class c in training, p_c the share of the class among the client's own samples.

    Menon, Jayasumana, Rawat, Jain, Veit, Kumar, "Long-Tail Learning via Logit Adjustment", ICLR 2021, eq. 10, with the
    priors of each client. τ = 0 is plain local training, bit for bit; so it is, up to rounding, where all classes are
    equally frequent.

    Args:
        tau: τ, at least 0. The paper takes 1.
        absent: Samples that a class without any counts for. With 0 its prior is 0, as in the formula: it leaves the
            softmax, and its row of the last layer is not trained.
    """

    def __init__(self, tau: float = 1.0, absent: float = 0.0) -> None:
        self.tau = expect_number("--client.tau", tau, least=0, of="LogitAdjustment")
        self.absent = expect_number("--client.absent", absent, least=0, of="LogitAdjustment")

    @property
    def active(self) -> bool:
        return self.tau > 0

    def change(self, scores: Tensor, counts: Tensor) -> Tensor:
        return scores + log_priors(counts, self.tau, self.absent).to(scores.dtype)


class FedRS(_ByCounts):
    """Multiplies the scores of classes that the client has no sample of by α in training.

    Li, Zhan, "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data", KDD 2021.
    The rows of the last layer of absent classes are pushed away less. α = 1 is plain local training, bit for bit.

    Args:
        alpha: α in [0, 1]. The paper takes 0.5.
    """

    def __init__(self, alpha: float = 0.5) -> None:
        self.alpha = expect_number("--client.alpha", alpha, least=0, most=1, of="FedRS")

    @property
    def active(self) -> bool:
        return self.alpha < 1

    def change(self, scores: Tensor, counts: Tensor) -> Tensor:
        return scores * restricted_factors(counts, self.alpha).to(scores.dtype)


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
