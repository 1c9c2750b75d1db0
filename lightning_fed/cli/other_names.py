"""Options under names that are not those of the trainer's signature: Lightning's, and those of groups without these."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import yaml
from jsonargparse import Namespace

from lightning_fed.cli.yaml_loader import ConfigLoader
from lightning_fed.trainer.lightning_arguments import ALIASES, FOREIGN, own_arguments, same_twice

__all__ = ["own_name", "own_variables", "own_words", "take_lightnings"]


def take_lightnings(config: Any, parent: str = "") -> None:
    """Renames the trainer's options that have other names, in place, and answers those without a meaning."""
    found = config.get("trainer") if parent != "trainer" and isinstance(config, (dict, Namespace)) else config
    options = found if isinstance(found, (dict, Namespace)) else {}
    for name in [name for name in FOREIGN if name in options]:
        for path, value in own_arguments({name: options.pop(name)}).items():
            group, _, part = path.rpartition(".")
            if group and group not in options:
                options[group] = type(options)()
            place = options[group] if group else options
            if not isinstance(place, (dict, Namespace)) or part in place:
                raise same_twice(path, "it", f"`--trainer.{name}`")
            place[part] = value


def own_name(option: str) -> str:
    """Returns the dotted name of an option of the trainer, or of one below it, whatever it is called."""
    trainer, _, rest = option.partition(".")
    name, *below = rest.split(".")
    return ".".join([trainer, ALIASES[name], *below]) if trainer == "trainer" and name in ALIASES else option


def own_words(words: Sequence[str]) -> list[str]:
    """Does the same for the words of a command line."""
    kept, rest = [], iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        name = option.removeprefix("--")
        if (own := own_name(name)) != name:
            kept.append(f"--{own}{equals}{value}")
        elif name.removeprefix("trainer.") in FOREIGN and name.startswith("trainer."):
            value = value if equals else next(rest, "")
            with suppress(yaml.YAMLError):
                value = yaml.load(value, Loader=ConfigLoader)
            own_arguments({name.removeprefix("trainer."): value})
        else:
            kept.append(word)
    return kept


def own_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Does the same for environment variables."""
    own: dict[str, str] = {}
    for variable, value in variables.items():
        command, trainer, name = variable.partition("__TRAINER__")
        path = ALIASES.get(name.lower())
        renamed = variable if path is None else f"{command}{trainer}{path.replace('.', '__').upper()}"
        if path is not None and renamed in variables:
            raise same_twice(path, renamed, variable)
        own[renamed] = value
    return own
