"""A user's mistake as one sentence: the exception, and the checks of single options."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from math import inf
from numbers import Integral, Real
from typing import Any, TypeVar

__all__ = [
    "Diverged", "FederatedError", "add_note", "expect", "expect_choice", "expect_count", "expect_number",
    "expect_one_each", "expect_variables", "import_extra", "is_count", "is_number",
]  # fmt: skip

_Value = TypeVar("_Value")
_SINGLE = 2.0**128  # numbers of single precision, in which models compute, are below this


class FederatedError(ValueError):
    """A mistake in the configuration, the data or the user's module.

    The message is one sentence: what was expected, what came, and which option to change. The command line prints it
    as the last line on stderr, without a traceback.

    Attributes:
        is_told: Whether another process of the run already reports the error.
    """

    is_told: bool = False


class Diverged(FederatedError):
    """More clients of a round than allowed have losses or updates that are not finite."""


def add_note(error: BaseException, note: str) -> None:
    """Adds a line below the traceback of an exception; Python 3.10 has no notes, so there it is printed at once."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        sys.stderr.write(f"{note}\n")


def is_count(value: Any, least: int = 1) -> bool:
    """Says whether a value is an integer (not a bool) of at least ``least`` that fits into 64 bits."""
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) < 2**63


def is_number(value: Any, least: float = -inf, above: float = -inf, below: float = inf, most: float = inf) -> bool:
    """Says whether a value is a finite number (not a bool) within the bounds."""
    number = value  # typed as Any, because mypy does not know that a Real can be compared
    if isinstance(value, bool) or not isinstance(value, Real) or not -_SINGLE < number < _SINGLE:
        return False
    return least <= float(value) <= most and above < float(value) < below


def expect(condition: object, sentence: str) -> None:
    """Refuses what does not hold, with one sentence: what was expected, what came, and which option to change."""
    if not condition:
        raise FederatedError(sentence)


def expect_count(option: str, value: _Value, least: int = 1, of: str = "", optional: bool = False) -> _Value:
    """Returns an integer of at least ``least`` and refuses anything else, where a constructor takes an option.

    For example ``self.tau = expect_count("--client.tau", tau, least=0)``.

    Args:
        option: The name of the option, such as ``--trainer.seed``, or of an argument.
        value: What the user gave.
        least: The smallest allowed value.
        of: The class that has the option, if the option's name does not say so.
        optional: Whether None is allowed too.
    """
    if not is_count(value, least) and not (optional and value is None):
        most = " and below 2**63" if is_number(value, least) else ""
        raise _wrong(option, of, f"an integer of at least {least}{most}", value)
    return value


def expect_number(
    option: str,
    value: _Value,
    least: float = -inf,
    above: float = -inf,
    below: float = inf,
    most: float = inf,
    of: str = "",
    optional: bool = False,
    by_round: bool = False,
) -> _Value:
    """Returns a finite number within the bounds, or with ``by_round`` a dict of them by round, and refuses others.

    For the other arguments see ``expect_count``, for what such a dict means ``core.updates.at_round``.
    """
    numbers = value if by_round and isinstance(value, dict) else {1: value}
    from_first = 1 in numbers or is_number(0, least, above, below, most)  # 0 is the number before the first round named
    named = numbers and from_first and all(map(is_count, numbers))
    within = named and all(is_number(number, least, above, below, most) for number in numbers.values())
    if within or (optional and value is None):
        return value
    if below == most == inf:
        words = f"at least {least} and finite" if above == -inf else f"a finite number above {above}"
    elif above == -inf and below == inf:
        words = f"in [{least}, {most}]"
    else:
        lower = f"at least {least}" if above == -inf else f"above {above}"
        words = f"{lower} and " + (f"at most {most}" if below == inf else f"below {below}")
    words += ", or such numbers by round from 1 on" if by_round else ""
    raise _wrong(option, of, words, value)


def expect_choice(option: str, value: _Value, known: Sequence[Any], of: str = "", optional: bool = False) -> _Value:
    """Returns one of the ``known`` values and refuses others; for the other arguments see ``expect_count``."""
    if value not in known and not (optional and value is None):
        raise _wrong(option, of, f"one of {', '.join(map(str, known))}", value)
    return value


def expect_one_each(option: str, values: Sequence[Any], num_clients: int) -> None:
    """Refuses a list that does not hold one number for each client."""
    if len(values) != num_clients:
        raise _wrong(option, "", f"a list of one number for each of {num_clients} clients", len(values))


def expect_variables(*names: str) -> None:
    """Refuses launchers' environment variables that are set but do not hold a count."""
    for name in names:
        value = os.environ.get(name, "0")
        if not value.strip().isdecimal():
            raise FederatedError(
                f"Expected the environment variable {name}, which launchers set, to be a whole number, got {value!r}: "
                "unset it, or let the launcher set it."
            )


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """Imports a module of a package from one of the extras."""
    package = module.partition(".")[0]
    try:
        import_module(package)
        return import_module(module)
    except ImportError as error:
        raise FederatedError(
            f"Expected {package} for {purpose}, but it cannot be imported ({error}): run "
            f"`pip install 'lightning_fed[{extra}]'`."
        ) from error


def _wrong(option: str, of: str, expected: str, value: Any) -> FederatedError:
    return FederatedError(f"Expected `{option}`{of and f' of {of}'} to be {expected}, got {value!r}.")
