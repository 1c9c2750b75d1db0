"""MNIST and Fashion-MNIST, read from their idx files."""

import os
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import TensorDataset

from lightning_fed.data.datamodule import BundledDataModule
from lightning_fed.data.idx import find_idx, read_idx
from lightning_fed.data.loading import Datasets
from lightning_fed.errors import FederatedError

__all__ = ["MNIST", "FashionMNIST"]

_FILES = {"train": "train", "test": "t10k"}


class MNIST(BundledDataModule):
    """60,000 + 10,000 images of handwritten digits, shape (1, 28, 28), normalised, 10 classes.

    Source: Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, "Gradient-based learning applied to document recognition",
    Proceedings of the IEEE 1998. The files, packed or not, lie in ``ROOT/MNIST/raw``; the folder may be read-only.

    Args:
        root: Folder of data sets; the environment variable ``LIGHTNING_FED_DATA`` if not given.
        download: Whether to fetch missing files into ``root`` (needs torchvision and a network).
        **kwargs: Every other option of ``BundledDataModule``.
    """

    folder: ClassVar[str] = "MNIST"
    mean: ClassVar[float] = 0.1307
    std: ClassVar[float] = 0.3081

    def __init__(self, root: str | os.PathLike[str] | None = None, download: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = root
        self.download = download

    def prepare_data(self) -> None:
        """Fetches the files if ``download`` is set and one is missing.

        Raises:
            FederatedError: If they cannot be fetched.
        """
        if not self.download or not self._missing():
            return
        import torchvision

        try:
            getattr(torchvision.datasets, self.folder)(self._root(), download=True)
        except (OSError, RuntimeError) as error:
            raise FederatedError(
                f"Expected to download {self.folder} into {self._root()}, but that failed ({error}): put its four idx "
                f"files into {self._raw()} yourself, or change `--data.root`."
            ) from error

    def load_datasets(self) -> Datasets:
        """Reads the four files."""
        return Datasets(train=self._read("train"), test=self._read("test"))

    def _read(self, part: str) -> TensorDataset:
        images = self._array(part, "images-idx3-ubyte", ndim=3)
        labels = self._array(part, "labels-idx1-ubyte", ndim=1)
        if images.shape[1:] != (28, 28) or len(images) != len(labels) or labels.max(initial=0) > 9:
            raise FederatedError(
                f"The {part} files in {self._raw()} are not those of {self.folder}: expected images of 28 x 28 and as "
                f"many labels from 0 to 9, got images of shape {images.shape} and {len(labels)} labels up to "
                f"{labels.max(initial=0)}; {self._advice()}."
            )
        inputs = torch.from_numpy(images).unsqueeze(1).to(torch.float32)
        inputs.div_(255).sub_(self.mean).div_(self.std)
        return TensorDataset(inputs, torch.from_numpy(labels.astype(np.int64)))

    def _array(self, part: str, kind: str, ndim: int) -> Any:
        name = f"{_FILES[part]}-{kind}"
        path = find_idx(self._raw(), name)
        if path is None:
            raise FederatedError(
                f"Expected the file {self._raw() / name} (or {name}.gz), found none: set `--data.root` to the folder "
                f"that holds {self.folder}/raw, or set `--data.download true` to fetch it."
            )
        return read_idx(path, ndim, self._advice())

    def _missing(self) -> bool:
        kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
        return any(find_idx(self._raw(), f"{part}-{kind}") is None for part in _FILES.values() for kind in kinds)

    def _advice(self) -> str:
        return "delete it and set `--data.download true` to fetch it again"

    def _raw(self) -> Path:
        return self._root() / self.folder / "raw"

    def _root(self) -> Path:
        root = self.root or os.environ.get("LIGHTNING_FED_DATA")
        if not root:
            raise FederatedError(
                "Expected `--data.root` (or the environment variable LIGHTNING_FED_DATA) to name the folder that "
                f"holds {self.folder}/raw, got neither."
            )
        return Path(root).expanduser()


class FashionMNIST(MNIST):
    """60,000 + 10,000 images of clothes, shape (1, 28, 28), normalised, 10 classes.

    Source: H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
    Algorithms", 2017, https://arxiv.org/abs/1708.07747. The files lie in ``ROOT/FashionMNIST/raw``.

    Args:
        root: Folder of data sets; the environment variable ``LIGHTNING_FED_DATA`` if not given.
        download: Whether to fetch missing files into ``root`` (needs torchvision and a network).
        **kwargs: Every other option of ``BundledDataModule``.
    """

    folder: ClassVar[str] = "FashionMNIST"
    mean: ClassVar[float] = 0.2860
    std: ClassVar[float] = 0.3530
