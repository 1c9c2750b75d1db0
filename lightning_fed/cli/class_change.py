"""Changing a class in the configuration drops every argument of the former class.

jsonargparse keeps, on a change of ``class_path``, the former ``init_args`` that the new class also accepts. So
``aggregator: FedAvg(lr=0.05, mask=...)`` in a file followed by ``--aggregator Other`` would build Other with the
learning rate and mask of FedAvg: a baseline that nobody asked for. Every place where jsonargparse compares two values
of an option (two files, a file and an option, a default and either, an element of a list, an argument within an
argument) decides through one function, ``jsonargparse._typehints.discard_init_args_on_class_path_change``. It is
replaced here, and only while one of our parsers is parsing, so other users of jsonargparse in the process see no
change.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from jsonargparse import _loaders_dumpers, _typehints

from lightning_fed.cli.suggestions import find_class
from lightning_fed.cli.yaml_loader import ConfigLoader

__all__ = ["class_rules"]

_OWN_PACKAGE = "lightning_fed."


def _discard_former_arguments(parser_or_action: Any, prev_val: Any, value: Any) -> None:
    """Drops all arguments of the former class from ``prev_val`` if ``value`` names another, by whatever path."""
    former, new = prev_val.get("class_path") if prev_val else None, value["class_path"]
    if former and former != new and find_class(former) is not find_class(new):
        for arguments in ("init_args", "dict_kwargs"):
            prev_val.pop(arguments, None)


_resolve_name = _typehints.resolve_class_path_by_name


def _resolve_own_first(cls: Any, name: str) -> str:
    """Resolves a short class name; of several classes of that name the package's own one is meant.

    ``MLP`` would else be ambiguous as soon as torchvision, which has one too, is loaded.
    """
    if not isinstance(name, str):
        raise ValueError(f"Expected a dot import path string: {name}")
    try:
        return _resolve_name(cls, name)
    except ValueError:
        paths = _typehints.get_all_subclass_paths(cls)
        own = [path for path in paths if path.startswith(_OWN_PACKAGE) and path.rsplit(".", 1)[1] == name]
        if len(own) != 1:
            raise
        return own[0]


_RULES: tuple[tuple[Any, str, Any], ...] = (
    (_typehints, "discard_init_args_on_class_path_change", _discard_former_arguments),
    (_typehints, "resolve_class_path_by_name", _resolve_own_first),
    # Wherever jsonargparse reads a value, in files, variables and words; `set_loader` is for whole files alone.
    (_loaders_dumpers, "yaml_default_loader", ConfigLoader),
)


@contextmanager
def class_rules() -> Iterator[None]:
    """Applies the rules for classes, and those for YAML, to everything parsed inside.

    Raises:
        AttributeError: If this jsonargparse has no such function any more: better than building wrong baselines.
    """
    with ExitStack() as rules:
        for module, name, rule in _RULES:
            rules.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, rule)
        yield
