"""Codecs: payloads that send less than an update, and what the server makes of it."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.callbacks.payload import Packed, Payload
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import Client, Update
from lightning_fed.errors import expect_count, expect_number
from lightning_fed.functional.geometry import wide_dtype

__all__ = ["QSGD", "RandomK", "TopK"]


class _Sparse(Payload):
    """Sends k = max(1, round(``share`` d)) coordinates in the dtype of δ_i, float32 or wider; the others are 0."""

    def __init__(self, share: float) -> None:
        self.share = expect_number("share", share, above=0, most=1, of=type(self).__name__)

    def count(self, size: int) -> int:
        """Returns k for updates of ``size`` coordinates."""
        return max(1, round(self.share * size))

    def spread(self, trainer: TrainerLike, places: Tensor, values: Tensor) -> Tensor:
        """Returns a vector of zeros but for the values at their places, shape (d,); the next client reuses it."""
        sent = self.scratch("sent", trainer.weights).zero_()
        sent[places] = values
        return sent


class TopK(_Sparse):
    """Sends the k largest coordinates of e_i + δ_i; the rest is the client's e_i, which it adds in its next round.

    Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, Algorithm 1, on updates in place of gradients.
    What is sent and e_i make up what the client meant to send, in every round. A client that diverges or takes no step
    keeps its e_i. The places are sent as indices of ⌈log2 d⌉ bits, or as a map of d bits if that is shorter. With a
    share of 1 it is FedAvg, bit for bit.

    Args:
        share: Share of the coordinates that a client sends, above 0 and at most 1.
    """

    def __init__(self, share: float = 0.01) -> None:
        super().__init__(share)

    def encode(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> Packed:
        meant = self.scratch("meant", update.delta)
        trainer.client_states.recall("TopK", update.client.id, meant)
        meant += update.delta
        size = len(meant)
        count, bits = self.count(size), max(1, (size - 1).bit_length())
        places = meant.abs().topk(count, sorted=False).indices
        if count * bits >= size:
            places, bits = torch.zeros_like(meant, dtype=torch.bool).index_fill_(0, places, True), 1
        return {"values": meant[places], "places": (places, bits)}

    def unpack(self, trainer: TrainerLike, pl_module: LightningModule, client: Client, packed: Any) -> Tensor:
        return self.spread(trainer, packed["places"], packed["values"])

    def on_client_entered(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        """Stores e_i <- e_i + δ_i less what was sent, whatever a later payload made of that."""
        rest = self.scratch("meant", update.delta).sub_(self.scratch("sent", update.delta))
        trainer.client_states.store("TopK", update.client.id, rest)


class RandomK(_Sparse):
    """Sends k coordinates at places that both sides draw from the seed, times d / k: no index is sent.

    The mean over draws is δ_i, and E‖sent‖² = (d / k) ‖δ_i‖²: the random sparsification of Stich, Cordonnier, Jaggi,
    NeurIPS 2018, scaled to have no bias, and the random mask of Konečný et al., 2016, arXiv:1610.05492. With a share of
    1 it is FedAvg, bit for bit.

    Args:
        share: Share of the coordinates that a client sends, above 0 and at most 1.
    """

    def __init__(self, share: float = 0.1) -> None:
        super().__init__(share)

    def _places(self, trainer: TrainerLike, client: Client) -> Tensor:
        stream, size = self.stream(trainer, client), len(trainer.weights)
        return torch.randperm(size, generator=stream, device=stream.device)[: self.count(size)]

    def encode(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> Packed:
        return {"values": update.delta[self._places(trainer, update.client)]}

    def unpack(self, trainer: TrainerLike, pl_module: LightningModule, client: Client, packed: Any) -> Tensor:
        values = packed["values"]
        return self.spread(trainer, self._places(trainer, client), values * (len(trainer.weights) / len(values)))


class QSGD(Payload):
    """Rounds each coordinate at random to one of s levels of ‖δ_i‖, up or down so that the mean over draws is δ_i.

    It sends l_j = sign(δ_ij) ⌊s |δ_ij| / ‖δ_i‖ + u_j⌋ with u_j uniform in [0, 1), in ⌈log2 (2s + 1)⌉ bits each, and
    ‖δ_i‖ in float32; the server gets l_j ‖δ_i‖ / s. Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD:
    Communication-Efficient SGD via Gradient Quantization and Encoding", NeurIPS 2017, section 3.1, without its
    variable-length code.

    Args:
        levels: s, at least 1: coordinates are rounded to multiples of ‖δ_i‖ / s.
    """

    def __init__(self, levels: int = 4) -> None:
        self.levels = expect_count("levels", levels, of="QSGD")

    def encode(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> Packed:
        delta, wide, stream = update.delta, wide_dtype(update.delta), self.stream(trainer, update.client)
        norm = torch.linalg.vector_norm(delta, dtype=wide).to(torch.float32)
        draws = torch.rand(delta.shape, generator=stream, dtype=wide, device=stream.device)  # fine enough for few large
        sizes = (delta.abs() / norm.to(wide)).nan_to_num_(0.0, 0.0).mul_(self.levels)  # 0 / 0, or one that diverged
        levels = sizes.add_(draws).floor_().clamp_(max=self.levels).mul_(delta.sign()).add_(self.levels)
        return {"norm": norm.reshape(1), "levels": (levels.long(), (2 * self.levels).bit_length())}

    def unpack(self, trainer: TrainerLike, pl_module: LightningModule, client: Client, packed: Any) -> Tensor:
        sent = self.scratch("sent", trainer.weights).copy_(packed["levels"]).sub_(self.levels)
        return sent.mul_(packed["norm"].to(sent) / self.levels)
