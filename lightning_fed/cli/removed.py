"""Options that are no more, which configurations saved before still name."""

from typing import Any

from jsonargparse import Namespace

__all__ = ["REMOVED", "drop_removed"]

REMOVED = ("trainer.balance", "trainer.cuda_graphs")


def drop_removed(config: Any, parent: str = "") -> list[str]:
    """Drops options that are no more, in place, so that a saved configuration still runs.

    Args:
        config: A configuration, or the part of one below ``parent``.
        parent: Key of that part.

    Returns:
        The options that were there.
    """
    dropped = []
    for option in REMOVED:
        *groups, name = option.removeprefix(f"{parent}.").split(".")
        place = config
        for group in groups:
            place = place.get(group) if isinstance(place, (dict, Namespace)) else None
        if isinstance(place, (dict, Namespace)) and name in place:
            place.pop(name)
            dropped.append(option)
    return dropped
