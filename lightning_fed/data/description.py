"""What a model takes from the data of a data module, and what tells its clients from those of another."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_fed.core.describe import describe
from lightning_fed.data.division import Division
from lightning_fed.data.inspection import input_shape
from lightning_fed.data.loading import LoadedData
from lightning_fed.data.skews import FeatureSkew, SkewedSets

__all__ = ["Description", "Divided", "name_skew", "name_targets"]


@dataclass(frozen=True)
class Description:
    """What a model takes from the data, as it sees them under the feature skew.

    Attributes: Those of ``FederatedDataModule`` of the same names.
    """

    num_classes: int | None
    class_names: tuple[str, ...] | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    input_shape: tuple[int, ...] | None

    @classmethod
    def of(cls, loaded: LoadedData, skew: FeatureSkew | None) -> "Description":
        """Describes what was loaded; ``skew`` is None where samples look as they are."""
        data, num_classes = loaded.datasets, loaded.num_classes
        shape, names, mean, std = input_shape(data.train), data.class_names, data.mean, data.std
        if skew is not None:
            num_classes, names = skew.num_classes(num_classes), skew.class_names(names)
            shape, mean, std = skew.input_shape(shape), skew.per_channel(mean), skew.per_channel(std)
        return cls(
            num_classes,
            None if names is None else tuple(names),
            None if mean is None else tuple(mean),
            None if std is None else tuple(std),
            shape,
        )


@dataclass
class Divided:
    """How the training set is divided under one seed, what it then looks like, and the hash once it was asked for."""

    division: Division
    skewed: SkewedSets | None
    hash: str | None = None


def name_targets(targets: npt.NDArray[Any] | None) -> str:
    """Names the targets by a digest of their values, whatever the width of their type.

    Args:
        targets: Numbers or strings, shape (samples,), None if there are none.

    Returns:
        Their kind and a SHA-256 in hexadecimal.
    """
    if targets is None:
        return "no targets"
    if targets.dtype.kind in "US":
        words = np.char.encode(targets, "utf-8") if targets.dtype.kind == "U" else targets
        kind, content = "strings", b"\0".join(words.tolist())
    elif targets.dtype.kind == "f":
        kind, content = "numbers", targets.astype("<f8").tobytes()
    else:
        kind, content = "integers", targets.astype("<i8").tobytes()
    return f"{kind} {hashlib.sha256(content).hexdigest()}"


def name_skew(skew: FeatureSkew | None, num_clients: int, seed: int) -> str:
    """Names a skew by all that its schemes depend on beside the data.

    Args:
        skew: The skew as the user gave it, None for none.
        num_clients: Clients that have a scheme.
        seed: Seed of the schemes.
    """
    if skew is None:
        return "no skew"
    options = json.dumps(describe(skew)["init_args"], sort_keys=True)
    return f"{type(skew).__name__} {options}, {num_clients} clients, seed {seed}"
