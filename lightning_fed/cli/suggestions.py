"""What exists: options of a command or a class, classes for an option; and what a misspelt name probably meant."""

import inspect
from argparse import Action
from collections.abc import Callable, Iterable
from contextlib import suppress
from difflib import get_close_matches
from pydoc import ErrorDuringImport, locate
from typing import Any, get_args, get_origin

from jsonargparse import ArgumentParser
from jsonargparse._common import ImportDenied, check_import_path
from lightning.pytorch import LightningModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = [
    "class_arguments",
    "class_options",
    "classes_for",
    "command_options",
    "did_you_mean",
    "find_class",
    "listing",
    "own_first",
]

_MOST_NAMES = 12
_LIBRARIES = ("lightning.", "torch.", "torchmetrics.", "torchvision.")


def command_options(parser: ArgumentParser) -> list[str]:
    """Returns the dotted names of a command's own options, without those of classes."""
    names = (string for action in parser._actions for string in action.option_strings)
    return sorted({name.lstrip("-") for name in names if name.startswith("--") and not name.endswith((".help", "+"))})


def find_class(path: str) -> Any:
    """Returns what an import path names, None if nothing does or ``--safe_imports`` does not allow to look."""
    try:
        check_import_path(path)
        return locate(path)
    except (ImportDenied, ErrorDuringImport):
        return None


def _class_parser(class_path: str) -> ArgumentParser:
    """Builds a parser for the arguments of a class or function, empty if they cannot be read."""
    parser = ArgumentParser(exit_on_error=False)
    found = find_class(class_path)
    with suppress(Exception):  # a suggestion must never fail where the message itself would have helped
        if isinstance(found, type):
            filled = {"params", "optimizer"} if issubclass(found, Optimizer | LRScheduler) else set()
            parser.add_class_arguments(found, fail_untyped=False, skip=filled)
        elif callable(found):
            parser.add_function_arguments(found, fail_untyped=False)
    return parser


def class_arguments(class_path: str) -> dict[str, Action]:
    """Returns what is known of the arguments of a class or function, by name."""
    parser = _class_parser(class_path)
    return {action.dest: action for action in parser._actions if action.dest != "help"}


def class_options(class_path: str) -> list[str]:
    """Returns the names of a class's arguments."""
    return [name for name in command_options(_class_parser(class_path)) if name != "help"]


def classes_for(parser: ArgumentParser, keys: tuple[str, ...], class_path: str) -> dict[str, str]:
    """Finds the classes that fit an option.

    Args:
        parser: The command's parser.
        keys: Path of the option.
        class_path: The class whose argument it is, empty if it is the command's own.

    Returns:
        Short name to import path, the package's own classes first, then others that are loaded.
    """
    owner, name = (_class_parser(class_path), keys[-1]) if class_path else (parser, ".".join(keys))
    action = next((action for action in owner._actions if action.dest == name), None)
    paths = {path for base in _bases(getattr(action, "_typehint", None)) for path in _concrete(base)}
    ranked = sorted(paths, key=lambda path: (not path.startswith("lightning_fed."), path.rsplit(".", 1)[1]))
    classes: dict[str, str] = {}
    for path in ranked:
        classes.setdefault(path.rsplit(".", 1)[1], path)
    return classes


def own_first(classes: dict[str, str]) -> list[str]:
    """Returns the names worth listing: of the package and the user if there are any, else of the libraries."""
    own = [name for name, path in classes.items() if not path.startswith(_LIBRARIES)]
    return own or list(classes)


def _bases(hint: Any) -> list[type]:
    """Collects the classes of a type hint whose subclasses are accepted."""
    if isinstance(hint, type) and get_origin(hint) is None:
        return [] if hint.__module__ == "builtins" else [hint]
    arguments = get_args(hint)
    if get_origin(hint) is get_origin(Callable[..., Any]):
        arguments = arguments[-1:]
    return [base for argument in arguments for base in _bases(argument)]


def _concrete(base: type) -> Iterable[str]:
    """Yields import paths of a class and its subclasses that can be built and are not private."""
    path = f"{base.__module__}.{base.__qualname__}"
    if not inspect.isabstract(base) and "<locals>" not in path and "._" not in path:
        yield path
    subclasses: list[type] = type.__subclasses__(base)
    for subclass in subclasses:
        # A LightningModule is an nn.Module, but never meant as a part of another one.
        if subclass is not LightningModule:
            yield from _concrete(subclass)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the known name closest to a misspelt one, empty if none is close."""
    known = list(known)
    lowered = {entry.lower(): entry for entry in reversed(known)}
    close = get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return lowered[close[0]] if close else ""


def listing(names: Iterable[str]) -> str:
    """Returns ``a, b and c``, cut after a dozen."""
    chosen = list(names)
    if len(chosen) > _MOST_NAMES:
        return ", ".join(chosen[:_MOST_NAMES]) + " and others"
    return " and ".join(part for part in (", ".join(chosen[:-1]), chosen[-1] if chosen else "") if part)
