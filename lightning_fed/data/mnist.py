"""MNIST and Fashion-MNIST, read from their idx files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_fed.data.idx import find_idx, read_idx
from lightning_fed.data.images import ImageDataModule
from lightning_fed.errors import FederatedError

__all__ = ["MNIST", "FashionMNIST", "IdxImages"]

_KINDS = {"images-idx3-ubyte": 3, "labels-idx1-ubyte": 1}


class IdxImages(ImageDataModule):
    """Base of image sets of shape (1, 28, 28) in pairs of idx files, packed or not.

    Args:
        **kwargs: Every option of ``ImageDataModule``.

    Attributes:
        title: The data set's name, for messages and in torchvision.
        stems: How the names of the training and of the test files begin.
        class_labels: The names of the classes.
        first_label: The label of the first class in the files; labels are counted from 0 here.
    """

    title: ClassVar[str]
    stems: tuple[str, str] = ("train", "t10k")
    class_labels: tuple[str, ...] = tuple("0123456789")
    first_label: int = 0

    def names(self) -> tuple[str, ...]:
        """Returns the names of the classes."""
        return self.class_labels

    def read(self, train: bool) -> tuple[Tensor, Tensor]:
        """Reads a pair of files."""
        stem = self.stems[0 if train else 1]
        images, labels = (self._array(f"{stem}-{kind}", ndim) for kind, ndim in _KINDS.items())
        low, high = self.first_label, self.first_label + len(self.class_labels) - 1
        found = (labels.min(initial=high), labels.max(initial=low))
        fits = images.dtype == np.uint8 and images.shape[1:] == (28, 28) and len(images) == len(labels)
        if not fits or found[0] < low or found[1] > high:
            kind = "" if images.dtype == np.uint8 else f"{images.dtype} "
            raise FederatedError(
                f"The {stem} files in {self.place} are not those of {self.title}: expected images of 28 x 28 and as "
                f"many labels from {low} to {high}, got {kind}images of shape {images.shape} and {len(labels)} labels "
                f"up to {found[1]}; {self.advice}."
            )
        return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels.astype(np.int64) - low)

    def is_complete(self) -> bool:
        """Whether all four files are there."""
        return all(path is not None for path in self._paths())

    def fetch(self, root: Path) -> None:
        """Downloads the files with torchvision."""
        import torchvision

        getattr(torchvision.datasets, self.title)(root, download=True)

    def _array(self, name: str, ndim: int) -> Any:
        path = find_idx(self.place, name)
        if path is None:
            raise self.missing(self.place / name, f" (or {name}.gz)")
        return read_idx(path, ndim, self.advice)

    def _paths(self) -> Iterator[Path | None]:
        return (find_idx(self.place, f"{stem}-{kind}") for stem in self.stems for kind in _KINDS)


class MNIST(IdxImages):
    """60,000 + 10,000 images of handwritten digits, shape (1, 28, 28), normalised, 10 classes.

    Source: Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, "Gradient-based learning applied to document recognition",
    Proceedings of the IEEE 1998. The files, packed or not, lie in ``ROOT/MNIST/raw``; the folder may be read-only.

    Args:
        **kwargs: Every option of ``ImageDataModule``.
    """

    title: ClassVar[str] = "MNIST"
    folder: ClassVar[str] = "MNIST/raw"
    pixel_mean = (0.1307,)
    pixel_std = (0.3081,)


class FashionMNIST(IdxImages):
    """60,000 + 10,000 images of clothes, shape (1, 28, 28), normalised, 10 classes.

    Source: H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
    Algorithms", 2017, https://arxiv.org/abs/1708.07747. The files lie in ``ROOT/FashionMNIST/raw``.

    Args:
        **kwargs: Every option of ``ImageDataModule``.
    """

    title: ClassVar[str] = "FashionMNIST"
    folder: ClassVar[str] = "FashionMNIST/raw"
    pixel_mean = (0.2860,)
    pixel_std = (0.3530,)
    class_labels = (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    )  # fmt: skip
