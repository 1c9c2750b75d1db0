"""What tells the clients of a data module from those of another."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_fed.core.user_code import describe
from lightning_fed.data.division import Division
from lightning_fed.data.skews import FeatureSkew, SkewedSets

__all__ = ["Divided", "name_skew", "name_targets"]


@dataclass
class Divided:
    """How the training set is divided under one seed, what it then looks like, and the hash once it was asked for."""

    division: Division
    skewed: SkewedSets | None
    hash: str | None = None


def name_targets(targets: npt.NDArray[Any] | None) -> str:
    """Names numbers or strings, shape (samples,), by their kind and a SHA-256, whatever the width of their type."""
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
    """Names a skew, as the user gave it, by all that its schemes depend on beside the data."""
    if skew is None:
        return "no skew"
    options = json.dumps(describe(skew)["init_args"], sort_keys=True)
    return f"{type(skew).__name__} {options}, {num_clients} clients, seed {seed}"
