"""Clients that attack: they train on wrong labels, or send something else than they have trained."""

from abc import abstractmethod
from typing import Any
from zlib import crc32

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.client_algorithms.losses import LossAlgorithm
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.seeding import Purpose, seed_for
from lightning_fed.core.updates import Client, Cohort, Update
from lightning_fed.errors import FederatedError, expect_number
from lightning_fed.functional.robust import supported_deviations

__all__ = ["ALIE", "Attack", "GaussianNoise", "IPM", "LabelFlip", "SignFlip"]


class Attack(ClientAlgorithm):
    """Says which clients attack; the column ``update/attackers`` counts those of a round.

    They are drawn once by the run's seed, the same ones under every attack and rule. Without any, or in rounds that
    draw none of them, training is as without the attack, bit for bit.

    Args:
        share: Share of the clients with samples that attack, in [0, 1), at least one if it is above 0.
        clients: Who attacks instead, by number, or by name where the data have names.

    Attributes:
        attackers: Their numbers, known when training begins.
    """

    stacks = True
    adds_to_gradient = False

    def __init__(self, share: float = 0.2, clients: list[int | str] | None = None) -> None:
        self.share = expect_number("--client.share", share, least=0, below=1, of=type(self).__name__)
        self.clients = clients
        self.attackers: frozenset[int] = frozenset()

    def check(self, trainer: TrainerLike) -> None:
        """Finds out who attacks, and refuses clients that are not there."""
        super().check(trainer)
        held = (trainer.client_sizes > 0).nonzero()[0]
        names = getattr(trainer.datamodule, "client_names", None) or ()
        if self.clients is None:
            count = max(1, round(self.share * len(held))) if self.share else 0
            rng = np.random.default_rng(seed_for(trainer.seed, Purpose.PAYLOAD, index=crc32(b"Attack")))
            self.attackers = frozenset(rng.permutation(held)[:count].tolist())
            return
        found = [names.index(one) if one in names else one for one in self.clients]
        for one, number in zip(self.clients, found, strict=True):
            if isinstance(number, bool) or number not in range(len(trainer.client_sizes)):
                raise FederatedError(
                    f"Expected `--client.clients` of {type(self).__name__} to be names or numbers below "
                    f"{len(trainer.client_sizes)} of clients, got {one!r}."
                )
        self.attackers = frozenset(map(int, found))

    def on_round_start(self, trainer: TrainerLike, pl_module: LightningModule, cohort: Cohort) -> None:
        pl_module.log("update/attackers", float(sum(client.id in self.attackers for client in cohort.clients)))


class _Sends(Attack):
    """Changes what attackers send."""

    @abstractmethod
    def corrupt(self, trainer: TrainerLike, update: Update) -> None:
        """Changes the update of an attacker in place."""

    def on_client_end(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        if update.client.id in self.attackers:
            self.corrupt(trainer, update)


class SignFlip(_Sends):
    """Sends a multiple of the update: δ_i <- c δ_i.

    c = -1 flips its signs; a large c is the scaled update of a model replacement (Bagdasaryan, Veit, Hua, Estrin,
    Shmatikov, "How To Backdoor Federated Learning", AISTATS 2020), c = 1 no attack.

    Args:
        factor: c.
        share: See ``Attack``.
        clients: See ``Attack``.
    """

    def __init__(self, factor: float = -1.0, share: float = 0.2, clients: list[int | str] | None = None) -> None:
        super().__init__(share, clients)
        self.factor = expect_number("--client.factor", factor, of="SignFlip")

    def corrupt(self, trainer: TrainerLike, update: Update) -> None:
        update.delta.mul_(self.factor)


class GaussianNoise(_Sends):
    """Adds noise: δ_i <- δ_i + c r z, r the root mean square of δ_i, z standard normal in each coordinate.

    Blanchard, El Mhamdi, Guerraoui, Stainer, NeurIPS 2017, section 6, send normal noise of a large variance.

    Args:
        scale: c, at least 0, at which it is no attack.
        share: See ``Attack``.
        clients: See ``Attack``.
    """

    def __init__(self, scale: float = 100.0, share: float = 0.2, clients: list[int | str] | None = None) -> None:
        super().__init__(share, clients)
        self.scale = expect_number("--client.scale", scale, least=0, of="GaussianNoise")

    def corrupt(self, trainer: TrainerLike, update: Update) -> None:
        delta, at = update.delta, (trainer.round, update.client.id)
        seed = seed_for(trainer.seed, Purpose.PAYLOAD, *at, index=crc32(b"GaussianNoise"))
        stream = torch.Generator(delta.device).manual_seed(seed)
        noise = torch.randn(delta.shape, generator=stream, out=self.scratch("noise", delta))
        delta.add_(noise.mul_(delta.square().mean().sqrt()), alpha=self.scale)


class LabelFlip(Attack, LossAlgorithm):
    """Trains on wrong labels: class c of C counts as class C - 1 - c.

    Fang, Cao, Jia, Gong, "Local Model Poisoning Attacks to Byzantine-Robust Federated Learning", USENIX Security 2020,
    section 5.1. The scores that ``self(x)`` returns to an attacker's ``training_step`` are those of the classes in
    reverse order: the loss is that of the flipped labels, if it treats classes alike, as cross-entropy does.

    Args:
        share: See ``Attack``.
        clients: See ``Attack``.
    """

    def __init__(self, share: float = 0.2, clients: list[int | str] | None = None) -> None:
        super().__init__(share, clients)

    def check(self, trainer: TrainerLike) -> None:
        super().check(trainer)
        self.expect_labels(trainer)

    def prepare(self, trainer: TrainerLike, client: Client) -> dict[str, Tensor]:
        return {"flips": trainer.weights.new_tensor([client.id in self.attackers])}

    def logits(self, output: Any, own: dict[str, Tensor]) -> Tensor:
        """Reverses the classes of scores (B, C, ...) for attackers."""
        if not isinstance(output, Tensor) or output.ndim < 2 or output.shape[1] < 2:
            got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
            raise FederatedError(
                f"Expected `self(x)` to return scores (B, C) for LabelFlip, got {got}: return one per class from "
                "`forward`."
            )
        return torch.where(own["flips"][0] > 0, output.flip(1), output)


class _Colludes(_Sends):
    """Sends one vector for all attackers of a round, made of what each would send if it were honest.

    Before the round each attacker trains plainly from w, without the run's method, and all of them learn the updates.
    This costs their local training once more, which no column counts.
    """

    at_nodes = False
    _sent: Tensor | None = None

    @abstractmethod
    def together(self, honest: Tensor, num_clients: int) -> Tensor:
        """Returns what all send, (d,), from their honest updates (m, d) in a round of ``num_clients``."""

    def on_round_start(self, trainer: TrainerLike, pl_module: LightningModule, cohort: Cohort) -> None:
        super().on_round_start(trainer, pl_module, cohort)
        own = [client.id for client in cohort.clients if client.id in self.attackers]
        self._sent = self.together(trainer.plain_updates(own), len(cohort.clients)) if own else None

    def corrupt(self, trainer: TrainerLike, update: Update) -> None:
        assert self._sent is not None
        update.delta.copy_(self._sent)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._sent = None


class ALIE(_Colludes):
    """Sends μ - z σ, the mean and standard deviation of the attackers' own honest updates, coordinate by coordinate.

    Baruch, Baruch, Goldberg, "A Little Is Enough: Circumventing Defenses For Distributed Learning", NeurIPS 2019,
    Algorithm 3. z is so small that enough honest clients lie further from the mean. z = 0 sends the mean.

    Args:
        z: z, at least 0; by default the largest that the algorithm allows for the clients and attackers of the round.
        share: See ``Attack``.
        clients: See ``Attack``.
    """

    def __init__(self, z: float | None = None, share: float = 0.2, clients: list[int | str] | None = None) -> None:
        super().__init__(share, clients)
        self.z = expect_number("--client.z", z, least=0, of="ALIE", optional=True)

    def together(self, honest: Tensor, num_clients: int) -> Tensor:
        z = supported_deviations(num_clients, len(honest)) if self.z is None else self.z
        return honest.mean(dim=0).sub_(honest.std(dim=0, correction=0), alpha=z)


class IPM(_Colludes):
    """Sends -ε μ, against the mean μ of the attackers' own honest updates: inner-product manipulation.

    Xie, Koyejo, Gupta, "Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product Manipulation", UAI 2020,
    section 4, where μ is the mean of all honest clients, which attackers do not know here.

    Args:
        epsilon: ε above 0: a small one to pass robust rules, a large one against the mean.
        share: See ``Attack``.
        clients: See ``Attack``.
    """

    def __init__(self, epsilon: float = 0.5, share: float = 0.2, clients: list[int | str] | None = None) -> None:
        super().__init__(share, clients)
        self.epsilon = expect_number("--client.epsilon", epsilon, above=0, of="IPM")

    def together(self, honest: Tensor, num_clients: int) -> Tensor:
        return honest.mean(dim=0).mul_(-self.epsilon)
