"""CIFAR-10 and CIFAR-100, read by torchvision from their Python batches."""

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_fed.data.datasets.bundled import ImageDataModule
from lightning_fed.errors import FederatedError

__all__ = ["CIFAR10", "CIFAR100"]


class CIFAR10(ImageDataModule):
    """50,000 + 10,000 colour images of shape (3, 32, 32), normalised, 10 classes.

    Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", technical report, University of
    Toronto 2009. The official "python version", unpacked, lies in ``ROOT/cifar-10-batches-py``. Files are checked
    against their official MD5 before they are read, because they are pickles, which can run code.
    """

    title: ClassVar[str] = "CIFAR10"
    folder: ClassVar[str] = "cifar-10-batches-py"
    # Over all pixels of the training images.
    pixel_mean = (0.4914, 0.4822, 0.4465)
    pixel_std = (0.2470, 0.2435, 0.2616)

    def read(self, train: bool) -> tuple[Tensor, Tensor]:
        """Reads the training or the test batches."""
        if (mistake := self._find_mistake()) is not None:
            raise mistake
        dataset = self._reader(self.data_root, train=train)
        self._names: list[str] = dataset.classes
        images = torch.from_numpy(dataset.data).permute(0, 3, 1, 2)
        return images.contiguous(), torch.tensor(dataset.targets, dtype=torch.int64)

    def names(self) -> list[str]:
        """Returns the names of the classes, as the file of names lists them."""
        return self._names

    def is_complete(self) -> bool:
        """Whether all files are there and are the official ones."""
        return self._find_mistake() is None

    def fetch(self, root: Path) -> None:
        """Downloads the batches with torchvision."""
        self._reader(root, download=True)

    @property
    def _reader(self) -> Any:
        import torchvision

        return getattr(torchvision.datasets, self.title)

    def _find_mistake(self) -> FederatedError | None:
        """Compares every file with its official MD5."""
        from torchvision.datasets.utils import check_integrity

        reader = self._reader
        for name, md5 in (*reader.train_list, *reader.test_list, (reader.meta["filename"], reader.meta["md5"])):
            path = self.place / name
            if not path.is_file():
                return self.missing(path)
            if not check_integrity(path, md5):
                return FederatedError(
                    f"The file {path} is not the official one of {self.title} (expected MD5 {md5}), it is truncated or "
                    f"changed: {self.advice}, or read arrays of your own with `--data Arrays`."
                )
        return None


class CIFAR100(CIFAR10):
    """50,000 + 10,000 colour images of shape (3, 32, 32), normalised, 100 (fine) classes.

    Source and checks as for ``CIFAR10``; the files lie in ``ROOT/cifar-100-python``.
    """

    title: ClassVar[str] = "CIFAR100"
    folder: ClassVar[str] = "cifar-100-python"
    pixel_mean = (0.5071, 0.4865, 0.4409)
    pixel_std = (0.2673, 0.2564, 0.2762)
