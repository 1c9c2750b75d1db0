"""What the labels of data sets mean, where these say it, and that they mean the same in all."""

from collections.abc import Mapping
from contextlib import suppress
from textwrap import shorten
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from lightning_fed.core.seeding import isolated_streams
from lightning_fed.data.inspection import TARGET_NAMES, as_targets
from lightning_fed.errors import FederatedError

__all__ = ["expect_one_meaning", "find_class_lists"]


def find_class_lists(dataset: Any, depth: int = 8) -> list[tuple[str, dict[str, str]]]:
    """Returns the class of each label as a data set says it, or as those do that it wraps, with whose list it is.

    It looks at ``class_to_idx``, at ``classes`` if these are words, and at the names that a table of Hugging Face has
    for its target column. A ``target_transform`` is followed; a wrapper that changes ``targets`` is not looked into.
    """
    if hasattr(dataset, "class_lists"):  # those of many clients
        return list(dataset.class_lists)
    names, labels = getattr(dataset, "classes", None), getattr(dataset, "class_to_idx", None)
    if isinstance(features := getattr(dataset, "features", None), Mapping):
        names = next((features[name].names for name in TARGET_NAMES if hasattr(features.get(name), "names")), names)
    if not isinstance(labels, Mapping):
        words = as_targets(names)
        labels = {n: i for i, n in enumerate(words)} if words is not None and words.dtype.kind == "U" else {}
    if labels:
        change = getattr(dataset, "target_transform", None) or (lambda label: label)
        with isolated_streams(0), suppress(Exception):  # it may want more than the number of a class
            return [("", {str(np.asarray(change(i)).squeeze().tolist()): str(n) for n, i in labels.items()})]
    return [each for part in _wrapped(dataset) for each in find_class_lists(part, depth - 1)] if depth else []


def expect_one_meaning(sets: Mapping[str, Any]) -> None:
    """Refuses data sets, each with its name for the message, of which two mean different classes by one label."""
    known: dict[tuple[str, str], tuple[Any, ...]] = {}
    for option, dataset in sets.items():
        for place, classes in find_class_lists(dataset):
            where = f"{place} of {option}" if place else option
            for label, name in classes.items():
                entry = (label, name, where, shorten(", ".join(classes.values()), 200))
                other = known.setdefault(("label", label), known.get(("name", name), entry))
                known.setdefault(("name", name), entry)
                if other[:2] != entry[:2] and other[2:] != entry[2:]:
                    one, two = (f"{each[0]} for {each[1]} in {each[2]} ({each[3]})" for each in (other, entry))
                    raise FederatedError(
                        f"Expected a label to mean one class in all data sets, got {one} and {two}: number the classes "
                        "alike, for example by a `target_transform`, or set `--data.class_labels false` if targets are "
                        "not class labels."
                    )


def _wrapped(dataset: Any) -> list[Any]:
    """Returns the data sets that a data set holds as attributes, without those whose targets it changes."""
    own = as_targets(getattr(dataset, "targets", None))
    held: list[Any] = []
    for value in getattr(dataset, "__dict__", {}).values():
        parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
        for part in parts if parts and isinstance(parts[0], Dataset) else [value]:
            if isinstance(part, Dataset) or hasattr(part, "column_names"):
                inner = None if own is None else as_targets(getattr(part, "targets", None))
                changed = own is not None and inner is not None and len(own) == len(inner) and (own != inner).any()
                held += [] if changed else [part]
    return held
