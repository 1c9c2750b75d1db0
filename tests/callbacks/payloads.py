"""Payloads of a user's own, and who else takes part in their rounds."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fed.callbacks import Payload
from lightning_fed.core.seeding import Purpose, numpy_generator_for
from lightning_fed.sampling import ClientSampler


class TopK(Payload):
    """Keeps the k largest coordinates, sent as values and indices of four bytes each."""

    def __init__(self, k: int | None) -> None:
        self.k = k

    def encode(self, trainer: Any, pl_module: Any, update: Any) -> None:
        k = self.k or len(update.delta)
        least = update.delta.abs().topk(k).values[-1]
        update.delta.masked_fill_(update.delta.abs() < least, 0.0)
        update.bytes_up = 8 * k


class RandomK(Payload):
    """Sends k values in single precision, of places that both sides draw; what is left is sent later."""

    def __init__(self, k: int) -> None:
        self.k = k

    def places(self, trainer: Any, client: Any) -> Tensor:
        stream = self.stream(trainer, client)
        return torch.randperm(len(trainer.weights), generator=stream, device=stream.device)[: self.k]

    def encode(self, trainer: Any, pl_module: Any, update: Any) -> Any:
        kept = torch.zeros_like(update.delta)
        trainer.client_states.recall("RandomK", update.client.id, kept)
        meant = self.scratch("meant", update.delta).copy_(update.delta + kept)
        return {"values": meant[self.places(trainer, update.client)].float()}

    def unpack(self, trainer: Any, pl_module: Any, client: Any, packed: Any) -> Tensor:
        delta = torch.zeros_like(trainer.weights)
        delta[self.places(trainer, client)] = packed["values"].to(delta)
        return delta

    def on_client_entered(self, trainer: Any, pl_module: Any, update: Any) -> None:
        rest = self.scratch("meant", update.delta) - update.delta
        trainer.client_states.store("RandomK", update.client.id, rest)


class Noise(Payload):
    """Adds Gaussian noise to the mean, by the bound of ``ClipUpdates``, and to what ``covers`` names."""

    adds_noise = True

    def __init__(self, sigma: float, covers: tuple[str, ...] = (), assumes_sampler: type | None = None) -> None:
        self.sigma, self.covers, self.assumes_sampler = sigma, covers, assumes_sampler

    def decode(self, trainer: Any, pl_module: Any, update: Any) -> None:
        for value in (update.mean, *(update.sums[name] for name in self.covers)):
            noise = torch.randn(value.shape, generator=self.stream(trainer), device=value.device)
            value.add_(noise, alpha=self.sigma / trainer.cohort_size)


class Poisson(ClientSampler):
    """Each client takes part by itself."""

    def sample(self, round: int, count: int, sizes: Any, seed: int) -> Any:
        drawn = numpy_generator_for(seed, Purpose.SAMPLE, round).random(len(sizes))
        return np.flatnonzero(drawn < count / len(sizes))
