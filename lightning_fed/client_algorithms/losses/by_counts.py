"""Losses that know which classes a client has: FedLC, logit adjustment, FedRS."""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from lightning_fed.client_algorithms.losses.base import LossAlgorithm
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import Client
from lightning_fed.errors import FederatedError, expect_number
from lightning_fed.functional.losses import calibration_margins, log_priors, restricted_factors

__all__ = ["FedLC", "FedRS", "LogitAdjustment"]


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
