"""Checks of the options that the data package shares."""

from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_fed.errors import FederatedError

__all__ = ["check_count", "check_fraction", "check_labels", "check_users"]


def check_count(option: str, value: object, minimum: int = 1) -> None:
    """Refuses anything but an integer of at least ``minimum``.

    Raises:
        FederatedError: Naming ``option``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise FederatedError(f"Expected `{option}` to be an integer of at least {minimum}, got {value!r}.")


def check_fraction(option: str, value: object) -> None:
    """Refuses anything but a number in [0, 1).

    Raises:
        FederatedError: Naming ``option``.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < 1:
        raise FederatedError(f"Expected `{option}` to be at least 0 and below 1, got {value!r}.")


def check_labels(option: str, targets: npt.NDArray[Any] | None, num_classes: int) -> None:
    """Refuses class labels that a model of the training data's classes has no output for.

    Args:
        option: What gave the set.
        targets: Its targets, shape (samples,), None if they are unknown; only integers are looked at.
        num_classes: Classes of the training data.

    Raises:
        FederatedError: Naming ``option``.
    """
    if targets is not None and targets.dtype.kind in "iu" and len(targets) and targets.max() >= num_classes:
        raise FederatedError(
            f"Expected {option} to hold class labels from 0 to {num_classes - 1}, as the training data do, got "
            f"{targets.max()}: leave such samples out, or let `Datasets` of a data module of your own name all classes "
            "(`class_names`), or say that targets are no class labels (`class_labels=False`)."
        )


def check_users(users: npt.NDArray[Any] | None) -> None:
    """Refuses NaN as the user of a sample, which would make one client of all samples without a user.

    Raises:
        FederatedError: If there is one.
    """
    if users is not None and users.dtype.kind == "f" and np.isnan(users).any():
        raise FederatedError(
            f"Expected `--data.users` to name the user of each training sample, got NaN for {np.isnan(users).sum()} of "
            f"{len(users)}: leave these samples out, or give them users."
        )
