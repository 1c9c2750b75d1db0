"""Finds options of a command or class, classes for an option, and the known name closest to a misspelt one."""

from argparse import Action
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from pydoc import ErrorDuringImport, locate
from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse._common import ImportDenied, check_import_path
from jsonargparse._typehints import get_all_subclass_paths

from lightning_fed.cli import COMMANDS, OF_TRAINER

__all__ = [
    "class_arguments", "classes_for", "command_options", "did_you_mean", "find_class", "listing", "unknown_command"
]  # fmt: skip

_MOST_NAMES = 12


def command_options(parser: ArgumentParser) -> list[str]:
    """Returns the dotted names of a command's own options, without the options of classes."""
    names = (string for action in parser._actions for string in action.option_strings)
    return sorted({name.lstrip("-") for name in names if name.startswith("--") and not name.endswith((".help", "+"))})


def find_class(path: str) -> Any:
    """Returns the object at an import path, None if there is none or ``--safe_imports`` does not allow it."""
    try:
        check_import_path(path)
        return locate(path)
    except (ImportDenied, ErrorDuringImport):
        return None


def class_arguments(class_path: str) -> dict[str, Action]:
    """Returns the arguments of a class or function by name; empty if its signature cannot be read."""
    from torch.optim import Optimizer  # only here, as who mistypes a command shall not wait for torch
    from torch.optim.lr_scheduler import LRScheduler

    parser = ArgumentParser(exit_on_error=False)
    found = find_class(class_path)
    with suppress(Exception):  # a suggestion must never replace the message itself by an error
        if isinstance(found, type):
            filled = {"params", "optimizer"} if issubclass(found, Optimizer | LRScheduler) else set()
            parser.add_class_arguments(found, fail_untyped=False, skip=filled)
        elif callable(found):
            parser.add_function_arguments(found, fail_untyped=False)
    return {action.dest: action for action in parser._actions if action.dest.rpartition(".")[2] != "help"}


def classes_for(parser: ArgumentParser, keys: tuple[str, ...], class_path: str) -> dict[str, str]:
    """Finds the loaded classes that fit an option.

    Args:
        parser: The command's parser.
        keys: Path of the option.
        class_path: The class that the option is an argument of, empty for an option of the command.

    Returns:
        Import path by short name, classes of this package first.
    """
    own = {action.dest: action for action in parser._actions}
    action = class_arguments(class_path).get(keys[-1]) if class_path else own.get(".".join(keys))
    hint = getattr(action, "_typehint", None)
    paths = get_all_subclass_paths(hint) if hint else []
    ranked = sorted(paths, key=lambda path: (not path.startswith("lightning_fed."), path.rsplit(".", 1)[1]))
    classes: dict[str, str] = {}
    for path in ranked:
        classes.setdefault(path.rsplit(".", 1)[1], path)
    return classes


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the known name closest to a misspelt one, empty if none is close."""
    known = list(known)
    lowered = {entry.lower(): entry for entry in reversed(known)}
    close = get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return lowered[close[0]] if close else ""


def listing(names: Iterable[str]) -> str:
    """Returns ``a, b and c``; after a dozen names ``and others``."""
    chosen = list(names)
    if len(chosen) > _MOST_NAMES:
        return ", ".join(chosen[:_MOST_NAMES]) + " and others"
    return " and ".join(part for part in (", ".join(chosen[:-1]), chosen[-1] if chosen else "") if part)


def unknown_command(name: str) -> str:
    """Returns the sentence for a word that is no command; it is empty if there is none."""
    known = [*OF_TRAINER, *COMMANDS]
    meant = did_you_mean(name, known)
    ending = f"{name!r}; did you mean `{meant}`?" if meant else f"{name!r}." if name else "none."
    return f"Expected the command before its options, one of {listing(known)}, got {ending}"
