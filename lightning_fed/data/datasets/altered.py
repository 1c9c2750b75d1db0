"""MNIST with altered inputs: colours or angles of each client, features that few share, noise, flipped labels."""

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
from lightning_fed.data.skews import BinaryColors, ClassColors, ClientColors, ClientRotation, FeatureSkew
from lightning_fed.errors import FederatedError, expect_count, expect_number

__all__ = ["ColoredMNIST", "ColoredMNISTBinary", "FedCMNIST", "FedRotMNIST", "SpuriousMNIST"]

_CLASSES = 10
# Streams of Purpose.SKEW, by the argument ``round``, apart from those of feature skews.
_ROWS, _TRAIN, _TEST, _SHUFFLED = 16, 17, 18, 19


class FedCMNIST(MNIST):
    """MNIST with a colour for each digit and another set of colours at each client, shape (3, 28, 28), 10 classes.

    Source: section 5.3 of Tenison et al., "Gradient Masked Averaging for Federated Learning", TMLR 2023; see
    ``ClientColors`` for what it leaves open. There are two test sets: ``seen_schemes`` in the clients' colours, and
    ``new_scheme`` in colours that no client has, which is the paper's. The files are those of ``MNIST``.

    Args:
        skew: How the clients differ.
        **kwargs: Every other option of ``MNIST``.
    """

    def __init__(self, skew: FeatureSkew | None = ClientColors(), **kwargs: Any) -> None:  # noqa: B008 - holds no state
        super().__init__(skew=skew, **kwargs)


class FedRotMNIST(MNIST):
    """MNIST turned by another angle at each client, shape (1, 28, 28), 10 classes.

    Named in the caption of Table 3 of Tenison et al., "Gradient Masked Averaging for Federated Learning", TMLR 2023,
    which does not define it; ``ClientRotation`` explains our reading. There are two test sets: ``seen_schemes`` at the
    clients' angles, and ``new_scheme`` at an angle that no client has. The files are those of ``MNIST``.

    Args:
        skew: How the clients differ.
        **kwargs: Every other option of ``MNIST``.
    """

    def __init__(self, skew: FeatureSkew | None = ClientRotation(), **kwargs: Any) -> None:  # noqa: B008 - holds no state
        super().__init__(skew=skew, **kwargs)


class ColoredMNISTBinary(MNIST):
    """Is a digit 5 or above? Its colour predicts that well at the clients, but misleads in the test set.

    Source: Arjovsky et al., "Invariant Risk Minimization", 2019, with the rates of the workshop paper on FedGMA
    (Tenison et al., 2021), see ``BinaryColors``. Images of shape (3, 28, 28), 2 classes; partitioners split by the
    digit, as the paper does. Of the two test sets, ``new_scheme`` is the paper's: reversed colours. The files are those
    of ``MNIST``.

    Args:
        skew: The rates of flipped colours and labels.
        **kwargs: Every other option of ``MNIST``.
    """

    def __init__(self, skew: FeatureSkew | None = BinaryColors(), **kwargs: Any) -> None:  # noqa: B008 - holds no state
        super().__init__(skew=skew, **kwargs)


class ColoredMNIST(MNIST):
    """MNIST with two foreground and two background colours for each digit, shape (3, 28, 28), 10 classes.

    Source: Arpit et al., "Predicting with High Correlation Features", 2019, and the workshop paper on FedGMA (Tenison
    et al., 2021), see ``ClassColors``. The colours are the same at all clients. Of the two test sets, ``new_scheme`` is
    the papers': other colours, which do not depend on the digit. The files are those of ``MNIST``.

    Args:
        skew: How many colours there are.
        **kwargs: Every other option of ``MNIST``.
    """

    def __init__(self, skew: FeatureSkew | None = ClassColors(), **kwargs: Any) -> None:  # noqa: B008 - holds no state
        super().__init__(skew=skew, **kwargs)


class SpuriousMNIST(MNIST):
    """MNIST as vectors of 784 pixels, with misleading features that a vote of the clients' signs can detect.

    Training images are dealt at random, the same number to each client. Four disturbances are off by default:

    - Signatures: clients form groups of ``shared``, and each group has a block of 10 further inputs. A sample of class
      y sets input y of its group's block to ``strength``. This tells the label only within the group: not more than
      shared / num_clients of the clients can agree on a block's weights. There are then three test sets: ``none`` has
      no signatures, ``wrong`` that of another class in a random block, ``own`` the right one. After the memorisation
      data of Parascandolo et al., "Learning explanations that are hard to vary", ICLR 2021.
    - Noise: further inputs drawn from a standard normal distribution, on which clients agree only by chance.
    - Flipped labels: a share of the clients, the first ones, trains on the labels 9 - y.
    - Shuffled labels: a share of the clients, the first ones, trains on its own labels in another order.

    All of it depends only on the split's seed. The files are those of ``MNIST``.

    Args:
        num_clients: Number of clients.
        samples_per_client: Training images of each client.
        shared: Clients that share a block, a divisor of ``num_clients``; None for no signatures.
        strength: Value of a signature's input; compare it with normalised pixels.
        decoys: Whether one random input of each foreign block is set as well, so that no vote on it is zero.
        noise: Number of noise inputs.
        flipped: Share of the clients that train on flipped labels, in [0, 1].
        shuffled: Share of the clients that train on shuffled labels, in [0, 1].
        partitioner: How samples are split; the default gives each client the samples made for it.
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
        shuffled: float = 0.0,
        partitioner: Partitioner = ByUser(),  # noqa: B008 - holds no state
        **kwargs: Any,
    ) -> None:
        super().__init__(num_clients=num_clients, partitioner=partitioner, **kwargs)
        most = self.counts[0] // max(num_clients, 1)
        expect_number("--data.samples_per_client", samples_per_client, least=1, most=most)
        expect_count("--data.noise", noise, least=0)
        expect_number("--data.flipped", flipped, least=0, most=1)
        expect_number("--data.shuffled", shuffled, least=0, most=1)
        if shared is not None and (shared < 1 or num_clients % shared):
            raise FederatedError(
                f"Expected `--data.shared` to be null or a divisor of the {num_clients} clients, got {shared!r}."
            )
        self.count, self.samples_per_client = num_clients, samples_per_client
        self.shared, self.strength, self.decoys = shared, strength, decoys
        self.noise, self.flipped, self.shuffled = noise, flipped, shuffled

    def identity(self) -> list[str]:
        """Adds the options, as size and labels may be the same for other ones."""
        spoiled = (self.samples_per_client, self.shared, self.strength, self.decoys, self.noise, self.flipped)
        shuffled = [f"shuffled {self.shuffled}"] if self.shuffled else []  # splits without keep their name
        return [*super().identity(), *map(str, spoiled), *shuffled]

    def load_datasets(self) -> Datasets:
        (images, labels), (test_images, test_labels) = (self.read(train) for train in (True, False))
        rows = numpy_generator_for(self._context()[1], Purpose.SKEW, _ROWS).permutation(len(images))
        chosen = torch.from_numpy(rows[: self.count * self.samples_per_client])
        images, labels = images[chosen], labels[chosen]
        users = np.arange(len(images)) % self.count
        groups = torch.from_numpy(users) // (self.shared or 1)
        draw = numpy_generator_for(self._context()[1], Purpose.SKEW, _TRAIN)
        inputs = self._inputs(images, labels, groups, draw)
        few = torch.from_numpy(users < round(self.flipped * self.count))
        given = torch.where(few, _CLASSES - 1 - labels, labels)
        draw = numpy_generator_for(self._context()[1], Purpose.SKEW, _SHUFFLED)
        for client in range(round(self.shuffled * self.count)):
            own = np.flatnonzero(users == client)
            given[own] = given[draw.permutation(own)]
        train = TensorDataset(inputs, given)
        return Datasets(train, test=self._tests(test_images, test_labels), class_names=self.names(), users=users)

    def _tests(self, images: Tensor, labels: Tensor) -> AnyDataset | dict[str, AnyDataset]:
        draw = numpy_generator_for(self._context()[1], Purpose.SKEW, _TEST)
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
