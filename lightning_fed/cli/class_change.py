"""A later option that names another class drops all arguments of the earlier class.

By itself jsonargparse keeps the ``init_args`` that the new class accepts too. ``aggregator: FedAvg(lr=0.05, mask=...)``
in a file, then ``--aggregator Other``, would build Other with the learning rate and the mask of FedAvg: a baseline that
nobody asked for. jsonargparse decides this in one function,
``jsonargparse._typehints.discard_init_args_on_class_path_change``, wherever an option has two values: from two files, a
file and the command line, a default, an element of a list, or an argument of an argument. We replace this function only
while one of our parsers is parsing, so other uses of jsonargparse in the process do not change.
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
    """Drops all arguments of the earlier class from ``prev_val`` if ``value`` names another class."""
    former, new = prev_val.get("class_path") if prev_val else None, value["class_path"]
    if former and former != new and find_class(former) is not find_class(new):
        for arguments in ("init_args", "dict_kwargs"):
            prev_val.pop(arguments, None)


_resolve_name = _typehints.resolve_class_path_by_name


def _resolve_own_first(cls: Any, name: str) -> str:
    """Resolves a short class name; if several classes share it, the one of this package wins.

    Otherwise ``MLP`` would be ambiguous as soon as torchvision is loaded, which has an ``MLP`` too.
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
    # Used for values in files, variables and on the command line; `set_loader` would change whole files only.
    (_loaders_dumpers, "yaml_default_loader", ConfigLoader),
)


@contextmanager
def class_rules() -> Iterator[None]:
    """Applies the rules for classes and for YAML to everything that is parsed inside the block.

    Raises:
        AttributeError: If this version of jsonargparse lacks one of the functions. Wrong baselines would be worse.
    """
    with ExitStack() as rules:
        for module, name, rule in _RULES:
            rules.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, rule)
        yield
