"""Differential privacy of whole clients: noise of the server on their sum, or of each client on its own update."""

import os
from math import exp
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_fed.callbacks.payload import Payload, clip_to
from lightning_fed.core.hooks import FederatedCallback, TrainerLike
from lightning_fed.core.updates import ReducedUpdate, Update
from lightning_fed.errors import expect, expect_number
from lightning_fed.functional.privacy import gaussian_epsilon, gaussian_noise
from lightning_fed.sampling import PoissonSampler

__all__ = ["Accounted", "CentralDP", "LocalDP", "system_normal"]


class Accounted(FederatedCallback):
    """Bounds something by C, and counts what noise of standard deviation z C costs.

    Attributes:
        z: z, as given or as found for ``epsilon`` and the rounds of the run.
        share: What else ε is counted for: the probability with which a client is drawn, or what batches hold.
        bound: C of the round.
        taken: How often noise was added; by client, shape (N,), where each adds its own.
        sensitivity: How far one client can move what gets noise, in units of C.
        secret: Whether noise comes from the operating system, and not from the seed of the run.
    """

    bounds_length = adds_noise = True
    sensitivity = 1
    assumes_sampler: type | None = None
    secret = False
    about = ""
    share: Any

    def __init__(self, clip: float, delta: float, noise: float | None = None, epsilon: float | None = None) -> None:
        name = type(self).__name__
        self.clip = expect_number("clip", clip, above=0, of=name)
        self.delta = expect_number("delta", delta, above=0, below=1, of=name)
        self.noise = expect_number("noise", noise, above=0, of=name, optional=True)
        self.epsilon = expect_number("epsilon", epsilon, above=0, of=name, optional=True)
        one = (noise is None) != (epsilon is None)
        expect(one, f"Expected `noise` or `epsilon` of {name}, got {noise} and {epsilon}: give one of them.")
        self.reads_length = noise is None  # in other rounds the same ε takes other noise

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        rounds = trainer.options.max_rounds  # not `trainer.max_rounds`, which would note that it was read
        clients, amplified = len(trainer.client_sizes), self.assumes_sampler is not None
        self.bound, self.taken = self.clip, torch.zeros(1 if amplified else clients, dtype=torch.int64)
        self.share = trainer.cohort_size / clients if amplified else 1.0
        self.z = self.noise or self.sensitivity * gaussian_noise(self.epsilon or 1.0, self.share, rounds, self.delta)
        self.about = (
            f"{self._noise()}, each client drawn with probability {self.share:.6g}; epsilon up to "
            f"{self._spent(rounds):.4g} after {rounds} rounds at delta {self.delta:g}, by the accountant rdp"
        )
        rank_zero_info(f"{type(self).__name__}: {self.about}.")

    def _noise(self) -> str:
        return f"noise {self.z:.6g} from {'the operating system' if self.secret else 'the seed of the run'}"

    def _spent(self, rounds: int) -> float:
        return gaussian_epsilon(self.z / self.sensitivity, self.share, rounds, self.delta)

    def state_dict(self) -> dict[str, Any]:
        return {"noise": [self.z, self.share], "bound": self.bound, "taken": self.taken.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before, now = state_dict["noise"], [self.z, self.share]
        expect(
            before == now,
            f"Expected {type(self).__name__} to go on with the noise and the sampling of the run so far, {before}, for "
            f"which ε is counted, got {now}: change `noise`, `--trainer.clients_per_round` or `--data.batch_size`.",
        )
        self.bound, self.taken = state_dict["bound"], state_dict["taken"].clone()


class CentralDP(Accounted, Payload):
    """The server adds noise to the sum of clipped updates, so that the model hardly depends on any one client.

    Δ̃ = (Σ_i δ_i min(1, C / ‖δ_i‖) + N(0, (z C)² I)) / (q N): DP-FedAvg with a fixed denominator (McMahan, Ramage,
    Talwar, Zhang, ICLR 2018), for any rule that reads the mean. As z → 0, with q = 1, it is ``ClipUpdates``.

    With ``quantile`` C follows that quantile of the lengths (Andrew, Thakkar, McMahan, Ramaswamy, NeurIPS 2021):
    C ← C exp(−η (b̃ − γ)), where b̃ is the share that was not clipped, with noise σ_b on its sum. Updates then get
    z_Δ = (z⁻² − (2 σ_b)⁻²)^(−1/2) in place of z, so that both together cost what z does.

    Logs ``privacy/epsilon``, by RDP for all rounds so far, ``privacy/clip``, C of the round, and b̃.

    Args:
        clip: C, above 0; with ``quantile`` that of the first round.
        delta: δ, below one over the number of clients.
        noise: z, above 0; or give ``epsilon``.
        epsilon: ε after ``--trainer.max_rounds`` rounds, for which z is found.
        quantile: γ in (0, 1); None for a fixed C.
        clip_rate: η, above 0.
        count_noise: σ_b, above z / 2; None for q N / 20.
        max_clip: The largest C, as noise makes updates longer, and these C larger; None for 10 times ``clip``.
        secret: Whether noise comes from the operating system, so that no run is the same again. Whoever knows the seed
            can compute and subtract the noise that comes from it.
    """

    assumes_sampler = PoissonSampler

    def __init__(
        self, clip: float, delta: float, noise: float | None = None, epsilon: float | None = None,
        quantile: float | None = None, clip_rate: float = 0.2, count_noise: float | None = None,
        max_clip: float | None = None, secret: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(clip, delta, noise, epsilon)
        self.quantile = expect_number("quantile", quantile, above=0, below=1, of="CentralDP", optional=True)
        self.clip_rate = expect_number("clip_rate", clip_rate, above=0, of="CentralDP")
        self.count_noise = expect_number("count_noise", count_noise, above=0, of="CentralDP", optional=True)
        self.max_clip = expect_number("max_clip", max_clip, least=clip, of="CentralDP", optional=True)
        self.secret, self.covers = secret, () if quantile is None else ("unclipped",)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        if self.delta * (clients := len(trainer.client_sizes)) >= 1:
            rank_zero_warn(
                f"`delta` of CentralDP is {self.delta:g} for {clients} clients: publishing the data of one of them "
                "would do too; lower it below one over their number."
            )
        self.of_count, self.of_mean = self.count_noise or trainer.cohort_size / 20, self.z
        if self.quantile is not None:
            expect(
                2 * self.of_count > self.z,
                f"Expected `count_noise` of CentralDP above half of the noise {self.z:.4g}, as it would cost more than "
                f"all of ε, got {self.of_count:g}: raise it, or `--trainer.clients_per_round`.",
            )
            self.of_mean = (self.z**-2 - (2 * self.of_count) ** -2) ** -0.5

    def encode(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        norm = clip_to(update.delta, self.bound)
        if self.quantile is not None:  # ±1/2, so that one client more or less moves the sum by 1/2 and not by 1
            update.send("unclipped", (norm <= self.bound).to(norm.dtype) - 0.5)

    def decode(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        """Adds the noise of the round for its C, whoever took part; then C of the next round follows the quantile."""
        stream, expected, logged = self.stream(trainer), trainer.cohort_size, {"privacy/clip": self.bound}
        update.noise = self.of_mean * self.bound / expected
        update.mean.mul_(update.num_clients / expected)
        update.mean.add_(self._normal(trainer, update.mean, stream), alpha=update.noise)
        if self.quantile is not None:
            count = update.sums.setdefault("unclipped", update.mean.new_zeros(()))
            count.add_(self._normal(trainer, count, stream), alpha=self.of_count)
            logged["privacy/unclipped"] = share = 0.5 + float(count) / expected
            most = self.max_clip or 10 * self.clip
            self.bound = min(self.bound * exp(-self.clip_rate * (share - self.quantile)), most)
        self.taken += 1
        pl_module.log_dict({"privacy/epsilon": self._spent(int(self.taken)), **logged})

    def _normal(self, trainer: TrainerLike, like: Tensor, stream: torch.Generator) -> Tensor:
        """Draws standard normal numbers once for all processes."""
        drawn = self.scratch(f"noise {like.dim()}", like)
        if not self.secret:
            return drawn.normal_(generator=stream)
        drawn.zero_()
        if trainer.is_global_zero:
            drawn.copy_(system_normal(drawn.numel()).view_as(drawn))
        return trainer.reduce_sum(drawn)


class LocalDP(Accounted, Payload):
    """Each client clips its update and adds noise to it, so that even the server learns little about its data.

    δ_i ← δ_i min(1, C / ‖δ_i‖) + N(0, (z C)² I), the Gaussian mechanism (Dwork, Roth, 2014, appendix A) on what a
    client sends. Other data of the client could have moved that by 2 C, so ε is that of noise z / 2; no sampling makes
    it smaller. The mean over n clients has noise z C / √n, √n times that of ``CentralDP`` for the same z.

    Logs ``privacy/local_epsilon``, ε of the client that took part most often. As z → 0 it is ``ClipUpdates``.

    Args:
        clip: C, above 0.
        delta: δ of each client.
        noise: z, above 0; or give ``epsilon``.
        epsilon: ε of a client that takes part in all ``--trainer.max_rounds`` rounds, for which z is found.
    """

    sensitivity = 2

    def encode(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        clip_to(update.delta, self.bound)
        drawn = self.scratch("noise", update.delta).normal_(generator=self.stream(trainer, update.client))
        update.delta.add_(drawn, alpha=self.z * self.bound)

    def decode(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        """Counts who took part."""
        self.taken[[client.id for client in update.clients]] += 1
        update.noise = self.z * self.bound / max(update.num_clients, 1) ** 0.5
        pl_module.log("privacy/local_epsilon", self._spent(int(self.taken.max())))


def system_normal(count: int) -> Tensor:
    """Draws standard normal numbers from the operating system's entropy: float64, shape (count,), on the CPU."""
    bits = torch.frombuffer(bytearray(os.urandom(8 * count)), dtype=torch.int64)
    drawn: Tensor = torch.special.ndtri(((bits & (2**52 - 1)).double() + 0.5) * 2**-52)  # of (0, 1)
    return drawn
