"""Other names of the trainer's options: Lightning's names, and names without their group."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import yaml
from jsonargparse import Namespace

from lightning_fed.cli import OF_TRAINER
from lightning_fed.cli.yaml_loader import ConfigLoader
from lightning_fed.errors import FederatedError
from lightning_fed.trainer.options import ALIASES, FOREIGN, own_arguments, same_twice

__all__ = ["Renames"]


class Renames:
    """Maps every accepted name of a trainer option to the name in the trainer's signature.

    Args:
        own: The trainer class's own arguments, whose names do not change.
    """

    def __init__(self, own: Iterable[str] = ()) -> None:
        self.own = frozenset(own)
        self._paths = {name: path for name, path in ALIASES.items() if name not in self.own}

    def name(self, option: str) -> str:
        """Returns the dotted name of a trainer option, or of an option below it, for any of its names."""
        trainer, _, rest = option.partition(".")
        name, *below = rest.split(".")
        return (
            ".".join([trainer, self._paths[name], *below]) if trainer == "trainer" and name in self._paths else option
        )

    def file(self, config: dict[Any, Any]) -> None:
        """Renames options in the content of a file, in place; other options of Lightning are translated or refused."""
        for command in OF_TRAINER:
            if isinstance(config.get(command), dict):
                self.file(config[command])
        for key in [key for key in config if str(key).startswith("trainer.")]:
            self._move(config, key, self.name(key))
        if isinstance(config.get("trainer"), dict):
            self.options(config["trainer"])

    def options(self, options: dict[Any, Any] | Namespace) -> None:
        """Does the same for a mapping of the trainer's options."""
        for key in [key for key in options if "." in str(key)] if isinstance(options, dict) else ():
            self._move(options, key, self.name(f"trainer.{key}").removeprefix("trainer."))
        foreign = {name: options.pop(name) for name in sorted(FOREIGN - self.own) if name in options}
        names = {path: name for name, path in ALIASES.items() if name in foreign}
        for path, value in own_arguments(foreign).items():
            group, _, part = path.rpartition(".")
            if group and group not in options:
                options[group] = type(options)()
            place = options[group] if group else options
            if isinstance(place, str):
                raise FederatedError(
                    f"Expected `--trainer.{names[path]}` in {place}, as `--trainer.{group}` is given too."
                )
            if not isinstance(place, (dict, Namespace)) or part in place:
                raise same_twice(path, "it", f"`--trainer.{names[path]}`")
            place[part] = value

    def _move(self, config: Any, key: str, own: str) -> None:
        if own != key:
            if own in config:
                raise same_twice(own.removeprefix("trainer."), "it", f"`--{key}`")
            config[own] = config.pop(key)

    def words(self, words: Sequence[str]) -> list[str]:
        """Does the same for command-line arguments."""
        kept, rest, foreign = [], iter(words), dict[str, Any]()
        for word in rest:
            option, equals, value = word.partition("=")
            name = option.removeprefix("--")
            if (own := self.name(name)) != name:
                kept.append(f"--{own}{equals}{value}")
            elif name.removeprefix("trainer.") in FOREIGN - self.own and name.startswith("trainer."):
                value = value if equals else next(rest, "")
                with suppress(yaml.YAMLError):
                    value = yaml.load(value, Loader=ConfigLoader)
                foreign[name.removeprefix("trainer.")] = value
            else:
                kept.append(word)
        own_arguments(foreign)
        return kept

    def variables(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Does the same for environment variables."""
        own: dict[str, str] = {}
        for variable, value in variables.items():
            command, trainer, name = variable.partition("__TRAINER__")
            path = self._paths.get(name.lower())
            renamed = variable if path is None else f"{command}{trainer}{path.replace('.', '__').upper()}"
            if path is not None and renamed in variables:
                raise same_twice(path, renamed, variable)
            own[renamed] = value
        return own
