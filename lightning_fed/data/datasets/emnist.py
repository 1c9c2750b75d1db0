"""EMNIST in all its variants, read from idx files."""

import string
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from lightning_fed.data.datasets.mnist import IdxImages
from lightning_fed.errors import expect_choice

__all__ = ["EMNIST"]

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
        """Reads a pair of files, and turns the images upright."""
        images, labels = super().read(train)
        return images.transpose(2, 3), labels

    def fetch(self, root: Path) -> None:
        """Downloads all variants with torchvision: they come in one archive."""
        import torchvision

        torchvision.datasets.EMNIST(root, split="balanced", download=True)
        (root / self.folder / "gzip.zip").unlink(missing_ok=True)
