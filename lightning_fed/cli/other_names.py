"""Options under Lightning's names that are not ours."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import yaml
from jsonargparse import Namespace

from lightning_fed.cli.yaml_loader import ConfigLoader
from lightning_fed.trainer.lightning_arguments import ALIASES, FOREIGN, own_arguments

__all__ = ["own_words", "take_lightnings"]


def take_lightnings(config: Any, parent: str = "") -> None:
    """Renames the trainer's options that Lightning calls otherwise, in place, and answers those without a meaning.

    Args:
        config: A configuration, or its part below ``parent``.
        parent: Where that is, empty for the whole.
    """
    options = config.get("trainer") if parent != "trainer" and isinstance(config, (dict, Namespace)) else config
    if isinstance(options, (dict, Namespace)):
        for name in FOREIGN:
            if name in options:
                for own, value in own_arguments({name: options.pop(name)}).items():
                    options[own] = value


def own_words(words: Sequence[str]) -> list[str]:
    """Does the same for the words of a command line."""
    kept, rest = [], iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        name = option.removeprefix("--trainer.")
        if name in ALIASES and name != option:
            kept.append(f"--trainer.{ALIASES[name]}{equals}{value}")
        elif name in FOREIGN and name != option:
            value = value if equals else next(rest, "")
            with suppress(yaml.YAMLError):
                value = yaml.load(value, Loader=ConfigLoader)
            own_arguments({name: value})
        else:
            kept.append(word)
    return kept
