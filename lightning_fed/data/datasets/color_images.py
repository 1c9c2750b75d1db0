"""CIFAR-10 and CIFAR-100, read by torchvision from Python batches, and TinyImageNet, from its folders of files."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_fed.data.datasets.bundled import ImageDataModule
from lightning_fed.data.readers.files import read_images
from lightning_fed.errors import FederatedError, expect

__all__ = ["CIFAR10", "CIFAR100", "TinyImageNet"]

_URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
_MD5 = "90528d7ca1a48142e341f4ef8d21d0de"


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
        if (mistake := self._find_mistake()) is not None:
            raise mistake
        dataset = self._reader(self.data_root, train=train)
        self._names: list[str] = dataset.classes
        images = torch.from_numpy(dataset.data).permute(0, 3, 1, 2)
        return images.contiguous(), torch.tensor(dataset.targets, dtype=torch.int64)

    def names(self) -> list[str]:
        return self._names

    def is_complete(self) -> bool:
        """Whether all files are there and are the official ones."""
        return self._find_mistake() is None

    def fetch(self, root: Path) -> None:
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


class TinyImageNet(ImageDataModule):
    """100,000 + 10,000 colour images of shape (3, 64, 64), normalised, 200 classes.

    Source: Y. Le, X. Yang, "Tiny ImageNet Visual Recognition Challenge", course CS 231N, Stanford University 2015. The
    archive ``tiny-imagenet-200.zip``, unpacked, lies in ``ROOT/tiny-imagenet-200``. Its validation images are the test
    set here, because the labels of its test images were never published. Classes are numbered in the order of their ids
    (n01443537 is 0), as by ``torchvision.datasets.ImageFolder``.

    JPEG files are decoded once, into a cache of 1.4 GB. It is made again if it cannot be read or a file has changed.

    Args:
        cache_dir: Folder of the cache; ``lightning_fed`` in the user's cache folder if not given.
        **kwargs: Every option of ``ImageDataModule``.
    """

    folder: ClassVar[str] = "tiny-imagenet-200"
    pixel_mean = (0.4802, 0.4481, 0.3975)
    pixel_std = (0.2770, 0.2691, 0.2821)

    def __init__(self, cache_dir: str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.cache_dir = cache_dir

    def read(self, train: bool) -> tuple[Tensor, Tensor]:
        ids = self._ids()
        paths, labels = self._training_files(ids) if train else self._validation_files(ids)
        cache = f"{self.folder}-{'train' if train else 'val'}"
        images = read_images(paths, self.place, cache, self.cache_dir, 64, self.advice)
        return images, torch.tensor(labels, dtype=torch.int64)

    def names(self) -> list[str]:
        """Returns the first name that ``words.txt`` has for each class, or its id if there is none."""
        path = self.place / "words.txt"
        lines = self._text(path).splitlines() if path.is_file() else []
        words = dict(line.split("\t", 1) for line in lines if "\t" in line)
        return [words.get(name, name).split(",")[0].strip() for name in self._ids()]

    def is_complete(self) -> bool:
        lists = [self.place / "wnids.txt", self.place / "val" / "val_annotations.txt"]
        return all(path.is_file() for path in lists) and all(self._images_of(name).is_dir() for name in self._ids())

    def fetch(self, root: Path) -> None:
        from torchvision.datasets.utils import download_and_extract_archive

        download_and_extract_archive(_URL, root, md5=_MD5, remove_finished=True)

    def _text(self, path: Path) -> str:
        if not path.is_file():
            raise self.missing(path)
        return path.read_text("utf-8", "replace")

    def _ids(self) -> list[str]:
        """Reads the classes' ids, sorted."""
        path = self.place / "wnids.txt"
        ids = sorted(set(self._text(path).split()))
        expect(ids, f"Expected the file {path} to list the ids of 200 classes, got none; {self.advice}.")
        return ids

    def _images_of(self, name: str) -> Path:
        return self.place / "train" / name / "images"

    def _training_files(self, ids: Sequence[str]) -> tuple[list[Path], list[int]]:
        paths, labels = list[Path](), list[int]()
        for label, name in enumerate(ids):
            folder = self._images_of(name)
            found = sorted(folder.glob("*.JPEG")) if folder.is_dir() else []
            if not found:
                raise self.missing(folder / "*.JPEG")
            paths += found
            labels += [label] * len(found)
        counts = Counter(labels)
        if len(set(counts.values())) > 1:
            few = min(counts, key=lambda label: counts[label])
            raise FederatedError(
                f"Expected as many images of each class in {self.place / 'train'}, got {counts[few]} in "
                f"{self._images_of(ids[few])} and up to {max(counts.values())} elsewhere; {self.advice}."
            )
        return paths, labels

    def _validation_files(self, ids: Sequence[str]) -> tuple[list[Path], list[int]]:
        path = self.place / "val" / "val_annotations.txt"
        label_of = {name: label for label, name in enumerate(ids)}
        paths, labels = list[Path](), list[int]()
        for number, line in enumerate(self._text(path).splitlines(), 1):
            file, _, rest = line.partition("\t")
            name = rest.partition("\t")[0]
            if name not in label_of:
                raise FederatedError(
                    f"Expected line {number} of {path} to hold the name of an image and the id of its class, separated "
                    f"by tabs, got {line[:60]!r}; {self.advice}."
                )
            paths.append(self.place / "val" / "images" / file)
            labels.append(label_of[name])
            if not paths[-1].is_file():
                raise self.missing(paths[-1])
        expect(paths, f"Expected the file {path} to list the validation images, got none; {self.advice}.")
        return paths, labels
