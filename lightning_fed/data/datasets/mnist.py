"""MNIST, Fashion-MNIST and EMNIST in all its variants, read from their idx files."""

import gzip
import hashlib
import math
import string
import zlib
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_fed.data.datasets.bundled import ImageDataModule
from lightning_fed.errors import FederatedError, expect_choice

__all__ = ["EMNIST", "FashionMNIST", "IdxImages", "MNIST", "read_idx"]

Variant = Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"]

_ALL = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
# Lower-case letters that look like their capitals are one class with them (Cohen et al. 2017, section III).
_MERGED = tuple(name for name in _ALL if name not in "cijklmopsuvwxyz")
_DIGITS, _LETTERS = tuple(string.digits), tuple(string.ascii_uppercase)
# For each variant: the classes, the numbers of training and test images, and the training images' mean and std.
_VARIANTS: dict[str, tuple[tuple[str, ...], tuple[int, int], tuple[float, float]]] = {
    "byclass": (_ALL, (697_932, 116_323), (0.1736, 0.3316)),
    "bymerge": (_MERGED, (697_932, 116_323), (0.1736, 0.3316)),
    "balanced": (_MERGED, (112_800, 18_800), (0.1751, 0.3332)),
    "letters": (_LETTERS, (124_800, 20_800), (0.1722, 0.3309)),
    "digits": (_DIGITS, (240_000, 40_000), (0.1733, 0.3316)),
    "mnist": (_DIGITS, (60_000, 10_000), (0.1733, 0.3317)),
}
_KINDS = {"images-idx3-ubyte": 3, "labels-idx1-ubyte": 1}


class IdxImages(ImageDataModule):
    """Base of image sets of shape (1, 28, 28) in pairs of idx files, packed or not.

    Attributes:
        title: The data set's name, for messages and in torchvision.
        stems: How the names of the training and of the test files begin.
        class_labels: The names of the classes.
        first_label: The label of the first class in the files; labels are counted from 0 here.
        counts: How many training and test images there are.
        label_digests: SHA-256 of the training and of the test labels, a byte each; None if they are not compared.
    """

    title: ClassVar[str]
    stems: tuple[str, str] = ("train", "t10k")
    class_labels: tuple[str, ...] = tuple("0123456789")
    first_label: int = 0
    counts: tuple[int, int] = (60_000, 10_000)
    label_digests: tuple[str, str] | None = None

    def names(self) -> tuple[str, ...]:
        return self.class_labels

    def read(self, train: bool) -> tuple[Tensor, Tensor]:
        part = 0 if train else 1
        count, low, high = self.counts[part], self.first_label, self.first_label + len(self.class_labels) - 1
        path, images = self._array(part, "images-idx3-ubyte")
        if images.shape != (count, 28, 28):
            raise self._foreign(path, f"{count} images of 28 x 28 in bytes", f"images of shape {images.shape}")
        path, labels = self._array(part, "labels-idx1-ubyte")
        found = np.unique(labels).tolist()
        if len(labels) != count or found != list(range(low, high + 1)):
            what = f", {len(found)} different ones from {found[0]} to {found[-1]}" if found else ""
            raise self._foreign(path, f"{count} labels, all from {low} to {high} among them", f"{len(labels)}{what}")
        digest = hashlib.sha256(labels.tobytes()).hexdigest()
        if self.label_digests is not None and digest != self.label_digests[part]:
            expected = f"labels with the SHA-256 {self.label_digests[part][:12]}..."
            raise self._foreign(path, expected, f"{digest[:12]}..., those of another data set or changed ones")
        return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels.astype(np.int64) - low)

    def is_complete(self) -> bool:
        names = [f"{stem}-{kind}" for stem in self.stems for kind in _KINDS]
        return all(_find(self.place, name) is not None for name in names)

    def fetch(self, root: Path) -> None:
        import torchvision

        getattr(torchvision.datasets, self.title)(root, download=True)

    def _foreign(self, path: Path, expected: str, got: str) -> FederatedError:
        return FederatedError(
            f"The file {path} is not the official one of {self.title}: expected {expected}, got {got}; {self.advice}, "
            "or read data of your own with `--data Arrays`."
        )

    def _array(self, part: int, kind: str) -> tuple[Path, npt.NDArray[Any]]:
        name = f"{self.stems[part]}-{kind}"
        path = _find(self.place, name)
        if path is None:
            raise self.missing(self.place / name, f" (or {name}.gz)")
        return path, read_idx(path, _KINDS[kind], self.advice)


class MNIST(IdxImages):
    """60,000 + 10,000 images of handwritten digits, shape (1, 28, 28), normalised, 10 classes.

    Source: Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, "Gradient-based learning applied to document recognition",
    Proceedings of the IEEE 1998. The files, packed or not, lie in ``ROOT/MNIST/raw``; the folder may be read-only.
    """

    title: ClassVar[str] = "MNIST"
    folder: ClassVar[str] = "MNIST/raw"
    pixel_mean = (0.1307,)
    pixel_std = (0.3081,)
    label_digests = (
        "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
        "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
    )


class FashionMNIST(IdxImages):
    """60,000 + 10,000 images of clothes, shape (1, 28, 28), normalised, 10 classes.

    Source: H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
    Algorithms", 2017, https://arxiv.org/abs/1708.07747. The files lie in ``ROOT/FashionMNIST/raw``.
    """

    title: ClassVar[str] = "FashionMNIST"
    folder: ClassVar[str] = "FashionMNIST/raw"
    pixel_mean = (0.2860,)
    pixel_std = (0.3530,)
    label_digests = (
        "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
        "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
    )
    class_labels = (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    )  # fmt: skip


class EMNIST(IdxImages):
    """Handwritten digits and letters, upright images of shape (1, 28, 28), normalised.

    Source: G. Cohen, S. Afshar, J. Tapson, A. van Schaik, "EMNIST: an extension of MNIST to handwritten letters",
    IJCNN 2017. The files, packed or not, lie in ``ROOT/EMNIST/raw`` under their official names, such as
    ``emnist-balanced-train-images-idx3-ubyte``.

    Args:
        variant: One of the six that the paper calls splits: ``byclass`` and ``bymerge`` have 62 and 47 classes in
            814,255 images, ``balanced`` 47 in 131,600, ``letters`` 26, ``digits`` and ``mnist`` 10.
        **kwargs: Every option of ``ImageDataModule``.
    """

    title: ClassVar[str] = "EMNIST"
    folder: ClassVar[str] = "EMNIST/raw"

    def __init__(self, variant: Variant = "balanced", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        expect_choice("--data.variant", variant, get_args(Variant))
        self.variant = variant
        self.stems = (f"emnist-{variant}-train", f"emnist-{variant}-test")
        self.class_labels, self.counts, (mean, std) = _VARIANTS[variant]
        self.first_label = 1 if variant == "letters" else 0
        self.pixel_mean, self.pixel_std = (mean,), (std,)

    def read(self, train: bool) -> tuple[Tensor, Tensor]:
        images, labels = super().read(train)
        return images.transpose(2, 3), labels

    def fetch(self, root: Path) -> None:
        """Downloads all variants with torchvision: they come in one archive."""
        import torchvision

        torchvision.datasets.EMNIST(root, split="balanced", download=True)
        (root / self.folder / "gzip.zip").unlink(missing_ok=True)


def _find(folder: Path, name: str) -> Path | None:
    """Returns the path of a file in a folder, unpacked or with ``.gz``, None when there is neither."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_idx(path: Path, ndim: int, advice: str = "fetch it again") -> npt.NDArray[np.uint8]:
    """Reads an idx file of bytes in ``ndim`` dimensions, 1 for labels or 3 for images, packed or not."""
    content = _read(path, advice)
    start, kind = 4 + 4 * ndim, bytes([0, 0, 8, ndim])
    if len(content) < start or content[:4] != kind:
        raise FederatedError(
            f"The file {path} is not an idx file of bytes in {ndim} dimension(s): expected it to start with "
            f"{kind.hex()}, got {content[:4].hex() or 'nothing'}; {advice}."
        )
    shape = np.frombuffer(content, ">u4", count=ndim, offset=4).tolist()
    expected, found = math.prod(shape), len(content) - start
    if expected != found:
        state = "is truncated" if found < expected else "is too long"
        raise FederatedError(
            f"The file {path} {state}: its header promises {expected} bytes of data, it holds {found}; {advice}."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


def _read(path: Path, advice: str) -> bytes:
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path) as file:
            return file.read()
    except EOFError as error:
        raise FederatedError(f"The file {path} is truncated: its gzip stream ends early; {advice}.") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise FederatedError(f"The file {path} is not a sound gzip file ({error}); {advice}.") from error
    except OSError as error:
        raise FederatedError(f"The file {path} cannot be read ({error.strerror or error}); {advice}.") from error
