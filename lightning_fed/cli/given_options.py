"""Options given in another way: under Lightning's names or without their group, or for the model by the data.

``LightningCLI.link_arguments`` works only for classes at a fixed depth, and silently ignores a linked option that you
give. Here the linked options of the model and its backbone have no default. An option that you leave out is taken from
the data; one that you give must agree with the data.
"""

import math
from argparse import SUPPRESS, Action
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import yaml
from jsonargparse import ArgumentParser, Namespace
from torch import Tensor

from lightning_fed.cli import OF_TRAINER
from lightning_fed.cli.class_names import class_arguments
from lightning_fed.cli.yaml_loader import ConfigLoader
from lightning_fed.errors import FederatedError
from lightning_fed.trainer.options import ALIASES, FOREIGN, own_arguments, same_twice

__all__ = [
    "LINKED", "LinkedArgument", "Renames", "fill_from_data", "leave_to_the_data", "linked_arguments",
    "mark_as_linked",
]  # fmt: skip

LINKED = frozenset(
    {"num_classes", "class_names", "input_shape", "in_channels", "image_size", "in_features", "mean", "std"}
)
# These names may mean something else in a model, such as how weights are drawn: linked only without a default.
_OF_MANY_MEANINGS = frozenset({"mean", "std"})
# The only part of a model that reads the data. The inputs of other parts, such as a head, are features.
_PART = "backbone"
_MARK = "linked_to_data"


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


def mark_as_linked(parser: ArgumentParser, dest: str) -> None:
    """Marks an option that takes a class, so that its parser gets ``linked_to_data=True`` and leaves out defaults."""
    for action in parser._actions:
        if action.dest == dest and hasattr(action, "sub_add_kwargs"):
            action.sub_add_kwargs = {**action.sub_add_kwargs, _MARK: True}


def leave_to_the_data(parser: ArgumentParser) -> None:
    """Makes linked options of a model or its backbone optional and removes their defaults, to see which were given."""
    for action in parser._actions:
        if action.dest in LINKED:
            action.default, action.required = SUPPRESS, False
    mark_as_linked(parser, _PART)


class LinkedArgument(NamedTuple):
    """A linked argument of a class in the config.

    Attributes:
        path: Its place in the config.
        owner: Short name of the class.
        action: Its entry in the parser, with type and default.
    """

    path: str
    owner: str
    action: Action


def linked_arguments(options: Namespace, key: str = "model") -> list[LinkedArgument]:
    """Finds the linked arguments of the class under ``key`` in the options, and of its backbone."""
    spec = options.get(key)
    if not isinstance(spec, Namespace) or "class_path" not in spec:
        return []
    owner, arguments = spec.class_path.rsplit(".", 1)[-1], class_arguments(spec.class_path)
    own = [LinkedArgument(f"{key}.init_args.{name}", owner, arguments[name]) for name in arguments if name in LINKED]
    return own + linked_arguments(options, f"{key}.init_args.{_PART}")


def fill_from_data(slots: Iterable[LinkedArgument], options: Namespace, datamodule: Any) -> list[str]:
    """Fills the options of the model from the data, in place; others get their default.

    Returns:
        The places in ``options`` that were filled from the data and not given by you.

    Raises:
        FederatedError: If a given option contradicts the data, or a required option is neither given nor in the data.
    """
    return [slot.path for slot in slots if _fill(slot, options, datamodule)]


def _fill(slot: LinkedArgument, options: Namespace, datamodule: Any) -> bool:
    """Fills one argument; returns whether its value came from the data."""
    given, known, name = options.get(slot.path), None, slot.path.rpartition(".")[2]
    option = "--" + slot.path.replace(".init_args", "")
    # Also None if the class has no default for this argument.
    default = None if slot.action.default is SUPPRESS else slot.action.default
    if name not in _OF_MANY_MEANINGS or default is None:
        known = next((value for value in _values(datamodule, name) if _is_accepted(slot.action, value)), None)
    if given is not None:
        if known is not None and not _agree(given, known):
            raise FederatedError(
                f"Expected `{option}` to be {known}, as the data say ({type(datamodule).__name__}), got "
                f"{_plain(given)}: leave it out, change `--data`, or set `--link_data false` to take nothing from the "
                "data."
            )
        return False
    if known is None and slot.action.required:
        raise FederatedError(
            f"Expected a value for `{option}`, which {slot.owner} needs and the data do not provide, got none."
        )
    options[slot.path] = default if known is None else known
    return known is not None


def _values(datamodule: Any, name: str) -> list[Any]:
    """Returns the value of a linked argument from the data, in each form that a class may accept."""
    value = _plain(getattr(datamodule, name, None))
    if value is not None:
        # Grey images have one mean; a class may want it as a number or as a list with one entry for each channel.
        grey = name in _OF_MANY_MEANINGS and isinstance(value, list) and len(value) == 1
        return [value, value[0]] if grey else [value]
    shape = _plain(getattr(datamodule, "input_shape", None))
    if not isinstance(shape, list):
        return []
    if name == "in_features" and shape:
        return [math.prod(shape)]
    if name == "in_channels" and len(shape) == 3:
        return [shape[0]]
    if name == "image_size" and len(shape) == 3:
        return [shape[1], shape[1:]] if shape[1] == shape[2] else [shape[1:]]
    return []


def _plain(value: Any) -> Any:
    """Converts a value to one that YAML can hold; None if that is not possible."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Sequence):
        parts = [_plain(part) for part in value]
        return None if any(part is None for part in parts) else parts
    return None


def _is_accepted(action: Action, value: Any) -> bool:
    """Whether a value fits an argument's type; without a type every value fits."""
    annotation = getattr(action, "_typehint", None) or action.type
    if annotation is None:
        return True
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=annotation)
    with suppress(Exception):  # a type may raise anything
        parser.parse_object({"value": value})
        return True
    return False


def _agree(given: Any, known: Any) -> bool:
    """Whether two values are the same, up to rounding; one value equals a list of that one value."""
    given, known = (value if isinstance(value, list | tuple) else [value] for value in (given, known))
    return len(given) == len(known) and all(
        math.isclose(a, b, rel_tol=1e-6) if isinstance(a, int | float) and isinstance(b, int | float) else a == b
        for a, b in zip(given, known, strict=True)
    )
