"""Whether an argument is a number, asked before it is compared with one."""

from typing import Any

__all__ = ["is_count", "is_number"]


def is_number(value: Any, least: float = float("-inf"), above: float = float("-inf")) -> bool:
    """Says whether a value is a finite number, no bool, of at least ``least`` and more than ``above``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return least <= value < float("inf") and (above == float("-inf") or value > above) and value > float("-inf")


def is_count(value: Any, least: int = 1) -> bool:
    """Says whether a value is an integer, no bool, of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
