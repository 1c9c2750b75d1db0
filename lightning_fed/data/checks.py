"""Checks of the options that the data package shares."""

from numbers import Integral, Real

from lightning_fed.errors import FederatedError

__all__ = ["check_count", "check_fraction"]


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
