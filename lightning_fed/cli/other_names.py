"""Options under Lightning's names that are not ours."""

from collections.abc import Sequence
from typing import Any

import yaml
from jsonargparse import Namespace

from lightning_fed.cli.yaml_loader import ConfigLoader
from lightning_fed.trainer.lightning_arguments import ALIASES, FOREIGN, own_arguments

__all__ = ["own_words", "take_lightnings"]

_Place = dict[str, Any] | Namespace


def take_lightnings(config: Any, parent: str = "") -> None:
    """Renames the trainer's options that Lightning calls otherwise, in place, and answers those without a meaning."""
    place = _of_trainer(config, parent)
    for name in [name for name in FOREIGN if name in place]:
        for own, value in own_arguments({name: place.pop(name)}).items():
            place[own] = value


def own_words(words: Sequence[str]) -> list[str]:
    """Does the same for the words of a command line."""
    kept, rest = [], iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        name = option.removeprefix("--trainer.")
        if name in ALIASES and name != option:
            kept.append(f"--trainer.{ALIASES[name]}{equals}{value}")
        elif name in FOREIGN and name != option:
            own_arguments({name: _value(value if equals else next(rest, ""))})
        else:
            kept.append(word)
    return kept


def _value(word: str) -> Any:
    try:
        return yaml.load(word, Loader=ConfigLoader)
    except yaml.YAMLError:
        return word


def _of_trainer(config: Any, parent: str) -> _Place:
    """Returns the trainer's options in a configuration or its part below ``parent``, none if they are not there."""
    found = config.get("trainer") if parent != "trainer" and isinstance(config, (dict, Namespace)) else config
    return found if isinstance(found, (dict, Namespace)) else {}
