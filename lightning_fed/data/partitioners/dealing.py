"""Steps shared by several partitioners, each without a loop over clients or samples."""

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["by_class", "class_codes", "deal"]


def class_codes(targets: npt.NDArray[Any] | None) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """Numbers the classes of targets, shape (samples,), in ascending order of their labels.

    Returns:
        Samples of each class, shape (classes,), and the class of each sample, shape (samples,), of the smallest integer
        type, which a stable sort then orders in linear time.
    """
    _, codes, counts = np.unique(np.asarray(targets), return_inverse=True, return_counts=True)
    return counts, codes.astype(np.min_scalar_type(len(counts)))


def by_class(codes: npt.NDArray[Any], generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Returns all sample numbers, class after class, in random order within a class; shape (samples,)."""
    shuffled = generator.permutation(len(codes))
    return shuffled[np.argsort(codes[shuffled], kind="stable")]


def deal(shares: npt.NDArray[np.float64], num_samples: int, generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Cuts a row of samples into parts of given shares.

    A part of share p gets floor(p m) or ceil(p m) of m samples, p m in expectation. This is systematic sampling: m
    evenly spaced points with one random offset. Rounding all boundaries down would always favour the last parts.

    Args:
        shares: Shares of the parts, at least 0, not all 0, shape (parts,).
        num_samples: m.
        generator: What the offset is drawn from.

    Returns:
        The part of each sample, ascending, shape (m,).
    """
    edges = np.cumsum(shares)
    points = (np.arange(num_samples) + generator.random()) * (edges[-1] / max(num_samples, 1))
    # A point that rounding has put beyond the end goes to the last part with a share above 0.
    return np.asarray(np.minimum(np.searchsorted(edges, points, side="right"), np.flatnonzero(shares)[-1]))
