"""What a model must know of its data comes from the data: number of classes, shape of the inputs, normalisation.

``LightningCLI.link_arguments`` would do this for one depth of classes known beforehand, and an option that is given all
the same would silently count for nothing. Here the linked options of the model and of its backbone have no default: one
that is given must agree with the data, one that is not given is taken from them.
"""

import math
from argparse import SUPPRESS, Action
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from jsonargparse import ArgumentParser, Namespace
from torch import Tensor

from lightning_fed.cli.suggestions import class_arguments
from lightning_fed.errors import FederatedError

__all__ = ["LINKED", "LinkedArgument", "fill_from_data", "leave_to_the_data", "linked_arguments", "mark_as_linked"]

LINKED = frozenset(
    {"num_classes", "class_names", "input_shape", "in_channels", "image_size", "in_features", "mean", "std"}
)
# Words with other meanings in a model, such as how weights are drawn: linked only where the class has no value itself.
_OF_MANY_MEANINGS = frozenset({"mean", "std"})
# The one part of a model that reads the inputs; the inputs of others, such as a head, are not the data's.
_PART = "backbone"
_MARK = "linked_to_data"


def mark_as_linked(parser: ArgumentParser, dest: str) -> None:
    """Marks an option that takes a class: its parser will be told by ``linked_to_data=True`` to leave out defaults."""
    for action in parser._actions:
        if action.dest == dest and hasattr(action, "sub_add_kwargs"):
            action.sub_add_kwargs = {**action.sub_add_kwargs, _MARK: True}


def leave_to_the_data(parser: ArgumentParser, prefix: str) -> None:
    """Makes linked options optional and takes their defaults away: those given can be told from the others."""
    for action in parser._actions:
        if action.dest.startswith(prefix) and action.dest[len(prefix) :] in LINKED:
            action.default, action.required = SUPPRESS, False
    mark_as_linked(parser, prefix + _PART)


@dataclass(frozen=True)
class LinkedArgument:
    """A linked argument of a class in the config.

    Attributes:
        name: The argument.
        key: Where the class's arguments lie in the config.
        owner: Short name of the class.
        action: What its parser knows of the argument.
    """

    name: str
    key: str
    owner: str
    action: Action

    @property
    def option(self) -> str:
        """The argument's name on the command line."""
        return "--" + f"{self.key}.{self.name}".replace(".init_args", "")

    @property
    def path(self) -> str:
        """Where the argument lies in the config."""
        return f"{self.key}.{self.name}"


def linked_arguments(options: Namespace, key: str = "model") -> list[LinkedArgument]:
    """Finds the linked arguments of the class named at ``key``, and of its backbone, among a command's options."""
    spec = options.get(key)
    if not isinstance(spec, Namespace) or "class_path" not in spec:
        return []
    owner, arguments = spec.class_path.rsplit(".", 1)[-1], class_arguments(spec.class_path)
    own = [LinkedArgument(name, f"{key}.init_args", owner, arguments[name]) for name in arguments if name in LINKED]
    return own + linked_arguments(options, f"{key}.init_args.{_PART}")


def fill_from_data(slots: Iterable[LinkedArgument], options: Namespace, datamodule: Any) -> list[str]:
    """Writes what the data tell into the options of the model, in place; what they do not tell gets its default.

    Returned is where something was written that was not given and would come from the data again. Refused is an option
    that contradicts the data, and one that is needed and comes from nowhere.
    """
    return [slot.path for slot in slots if _fill(slot, options, datamodule)]


def _fill(slot: LinkedArgument, options: Namespace, datamodule: Any) -> bool:
    """Fills one argument; returns whether the data did."""
    given, known = options.get(slot.path), None
    # None where a class has no default for the argument at all, too.
    default = None if slot.action.default is SUPPRESS else slot.action.default
    if slot.name not in _OF_MANY_MEANINGS or default is None:
        known = next((value for value in _values(datamodule, slot.name) if _is_accepted(slot.action, value)), None)
    if given is not None:
        if known is not None and not _agree(given, known):
            raise FederatedError(
                f"Expected `{slot.option}` to be {known}, as the data say ({type(datamodule).__name__}), got "
                f"{_plain(given)}: leave it out, change `--data`, or set `--link_data false` to take nothing from the "
                "data."
            )
        return False
    if known is None and slot.action.required:
        raise FederatedError(
            f"Expected a value for `{slot.option}`, which {slot.owner} needs and the data do not tell, got none."
        )
    options[slot.path] = default if known is None else known
    return known is not None


def _values(datamodule: Any, name: str) -> list[Any]:
    """Returns what the data tell of a linked argument, in each form that a class may take it in."""
    value = _plain(getattr(datamodule, name, None))
    if value is not None:
        # Grey images have one mean, whether a class asks for a number or for one of each channel.
        grey = name in _OF_MANY_MEANINGS and isinstance(value, list) and len(value) == 1
        return [value, value[0]] if grey else [value]
    shape = _plain(getattr(datamodule, "input_shape", None))
    if not isinstance(shape, list) or not shape:
        return []
    if name == "in_features":
        return [math.prod(shape)]
    if name == "in_channels" and len(shape) == 3:
        return [shape[0]]
    if name == "image_size" and len(shape) == 3:
        return [shape[1], shape[1:]] if shape[1] == shape[2] else [shape[1:]]
    return []


def _plain(value: Any) -> Any:
    """Turns a value into one that can be written to YAML, None if it cannot."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Sequence):
        parts = [_plain(part) for part in value]
        return None if any(part is None for part in parts) else parts
    return None


def _is_accepted(action: Action, value: Any) -> bool:
    """Whether an argument's type takes a value; one without a type takes any."""
    annotation = getattr(action, "_typehint", None) or action.type
    if annotation is None:
        return True
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=annotation)
    with suppress(Exception):  # whatever it is that the type objects to
        parser.parse_object({"value": value})
        return True
    return False


def _agree(given: Any, known: Any) -> bool:
    """Whether two values are the same, be it that one is in a list or that the last digits differ."""
    given, known = _listed(given), _listed(known)
    return len(given) == len(known) and all(
        math.isclose(a, b, rel_tol=1e-6) if isinstance(a, int | float) and isinstance(b, int | float) else a == b
        for a, b in zip(given, known, strict=True)
    )


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
