"""Options that are no more, which configurations saved before still name."""

from typing import Any

from jsonargparse import Namespace

__all__ = ["REMOVED", "drop_removed"]

REMOVED = ("trainer.balance", "trainer.cuda_graphs")


def drop_removed(config: Any, parent: str = "") -> list[str]:
    """Drops them, in place, from a configuration or its part below ``parent``; returns those that were there."""
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
