"""MNIST beside inputs that mislead: features that few clients share, inputs of noise, labels that some clients flip."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fed.core.seeding import Purpose, numpy_generator_for
from lightning_fed.data.datasets.mnist import MNIST
from lightning_fed.data.inspection import AnyDataset
from lightning_fed.data.loading import Datasets
from lightning_fed.data.partitioners import ByUser, Partitioner
from lightning_fed.errors import FederatedError, expect_count, expect_number

__all__ = ["SpuriousMNIST"]

_CLASSES = 10
# Streams of Purpose.SKEW, by the argument ``round``, apart from those of feature skews.
_ROWS, _TRAIN, _TEST = 16, 17, 18


class SpuriousMNIST(MNIST):
    """MNIST as vectors of 784 pixels, with what a vote of the clients' signs can tell from a feature that all share.

    Clients are alike in their digits: training images are dealt at random, so many to each. Three options, each off by
    default, spoil them:

    - Signatures: clients are put into groups of ``shared``, each with a block of 10 further inputs. A sample of class y
      lights input y of its client's block with ``strength``, so it tells the label at home and nowhere else: at most
      shared / num_clients of the clients can agree on the weights of a block. There are three test sets then: ``none``
      without a signature, ``wrong`` with that of another class in a random block, ``own`` with the right one. After
      the memorisation data of Parascandolo et al., "Learning explanations that are hard to vary", ICLR 2021.
    - Noise: further inputs drawn from a standard normal distribution, on which clients agree by chance alone.
    - Flipped labels: the first clients, a share of all, train on 9 - y.

    All of it depends on the split's seed alone. The files are those of ``MNIST``.

    Args:
        num_clients: Clients.
        samples_per_client: Training images of each.
        shared: Clients that share a block, a divisor of ``num_clients``; None for no signatures.
        strength: What a signature lights its input with; pixels are normalised.
        decoys: Whether one random input of each foreign block is lit as well, so that no vote on it is zero.
        noise: Inputs of noise.
        flipped: Share of the clients that train on flipped labels, in [0, 1].
        partitioner: How samples are split; the default gives each client those made for it.
        **kwargs: Every other option of ``MNIST``.
    """

    def __init__(
        self,
        num_clients: int = 10,
        samples_per_client: int = 600,
        shared: int | None = None,
        strength: float = 6.0,
        decoys: bool = False,
        noise: int = 0,
        flipped: float = 0.0,
        partitioner: Partitioner = ByUser(),  # noqa: B008 - holds no state
        **kwargs: Any,
    ) -> None:
        super().__init__(num_clients=num_clients, partitioner=partitioner, **kwargs)
        most = self.counts[0] // max(num_clients, 1)
        expect_number("--data.samples_per_client", samples_per_client, least=1, most=most)
        expect_count("--data.noise", noise, least=0)
        expect_number("--data.flipped", flipped, least=0, most=1)
        if shared is not None and (shared < 1 or num_clients % shared):
            raise FederatedError(
                f"Expected `--data.shared` to be null or a divisor of the {num_clients} clients, got {shared!r}."
            )
        self.count, self.samples_per_client = num_clients, samples_per_client
        self.shared, self.strength, self.decoys = shared, strength, decoys
        self.noise, self.flipped = noise, flipped

    def identity(self) -> list[str]:
        """Adds what is spoiled, which neither the size nor the labels may tell."""
        spoiled = (self.samples_per_client, self.shared, self.strength, self.decoys, self.noise, self.flipped)
        return [*super().identity(), *map(str, spoiled)]

    def load_datasets(self) -> Datasets:
        """Reads both parts, and spoils them."""
        (images, labels), (test_images, test_labels) = (self.read(train) for train in (True, False))
        rows = numpy_generator_for(self._seed(), Purpose.SKEW, _ROWS).permutation(len(images))
        chosen = torch.from_numpy(rows[: self.count * self.samples_per_client])
        images, labels = images[chosen], labels[chosen]
        users = np.arange(len(images)) % self.count
        groups = torch.from_numpy(users) // (self.shared or 1)
        draw = numpy_generator_for(self._seed(), Purpose.SKEW, _TRAIN)
        inputs = self._inputs(images, labels, groups, draw)
        few = torch.from_numpy(users < round(self.flipped * self.count))
        train = TensorDataset(inputs, torch.where(few, _CLASSES - 1 - labels, labels))
        return Datasets(train, test=self._tests(test_images, test_labels), class_names=self.names(), users=users)

    def _tests(self, images: Tensor, labels: Tensor) -> AnyDataset | dict[str, AnyDataset]:
        draw = numpy_generator_for(self._seed(), Purpose.SKEW, _TEST)
        if self.shared is None:
            return TensorDataset(self._inputs(images, None, None, draw), labels)
        groups = torch.from_numpy(draw.integers(0, self._blocks, len(images)))
        wrong = (labels + torch.from_numpy(draw.integers(1, _CLASSES, len(labels)))) % _CLASSES
        signed = {"none": None, "wrong": wrong, "own": labels}
        return {name: TensorDataset(self._inputs(images, says, groups, draw), labels) for name, says in signed.items()}

    @property
    def _blocks(self) -> int:
        return self.count // self.shared if self.shared else 0

    def _inputs(self, images: Tensor, says: Tensor | None, groups: Tensor | None, draw: np.random.Generator) -> Tensor:
        """Returns pixels, blocks and noise side by side, shape (N, 784 + 10 blocks + noise)."""
        pixels = (images.flatten(1).to(torch.float32) / 255 - self.pixel_mean[0]) / self.pixel_std[0]
        lit = torch.zeros(len(images), self._blocks, _CLASSES)
        if self._blocks and self.decoys:
            places = torch.from_numpy(draw.integers(0, _CLASSES, (len(images), self._blocks, 1)))
            lit.scatter_(2, places, self.strength)
        if self._blocks and says is not None and groups is not None:
            rows = torch.arange(len(images))
            lit[rows, groups] = 0
            lit[rows, groups, says] = self.strength
        noise = torch.from_numpy(draw.standard_normal((len(images), self.noise), dtype=np.float32))
        return torch.cat([pixels, lit.flatten(1), noise], dim=1)
