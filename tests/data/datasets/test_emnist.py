"""Each variant of EMNIST is normalised with what its images have, as far as the by-class test images can tell."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_fed.data import EMNIST


@pytest.fixture(scope="module")
def moments(data_root: Path) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """For each of the 62 classes the means of x and x², x in [0, 1], and the number of images."""
    raw = data_root / "EMNIST" / "raw"
    if not list(raw.glob("emnist-byclass-test-images-*")):
        pytest.skip(f"no emnist-byclass-test files in {raw}")
    images, labels = EMNIST("byclass", root=data_root).read(train=False)
    pixels = images.flatten(1).numpy().astype(np.float32) / 255
    counts = np.bincount(labels.numpy(), minlength=62)
    sums = [np.bincount(labels.numpy(), part.mean(axis=1)) for part in (pixels, pixels**2)]
    return sums[0] / counts, sums[1] / counts, counts


def classes_of(variant: str) -> list[list[int]]:
    """The by-class classes that make each class of a variant."""
    if variant in ("digits", "mnist"):
        return [[label] for label in range(10)]
    if variant == "letters":
        return [[10 + letter, 36 + letter] for letter in range(26)]
    if variant == "byclass":
        return [[label] for label in range(62)]
    merged = [10 + "ABCDEFGHIJKLMNOPQRSTUVWXYZ".index(letter) for letter in "CIJKLMOPSUVWXYZ"]
    return [[label, label + 26] if label in merged else [label] for label in range(62) if label - 26 not in merged]


@pytest.mark.parametrize("variant", ["byclass", "bymerge", "balanced", "letters", "digits", "mnist"])
@pytest.mark.quick(2)
def test_mean_and_deviation_are_those_of_the_variants_images(
    variant: str, moments: tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]
) -> None:
    """Every image counts the same in two variants, every class in the others."""
    first, second, counts = moments
    weights = np.zeros(62)
    for members in classes_of(variant):
        share = counts[members] / counts[members].sum()
        weights[members] = share * (counts[members].sum() if variant in ("byclass", "bymerge") else 1)
    weights /= weights.sum()
    mean = (weights * first).sum()
    std = np.sqrt((weights * second).sum() - mean**2)
    data = EMNIST(variant)
    assert (*data.pixel_mean, *data.pixel_std) == pytest.approx((mean, std), abs=5e-4)
