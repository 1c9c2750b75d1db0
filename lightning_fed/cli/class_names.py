"""Finds options of a command, classes by their short names, also those of other packages, and the closest name."""

from argparse import Action
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pydoc import ErrorDuringImport, locate
from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse._common import ImportDenied, check_import_path
from jsonargparse._typehints import get_all_subclass_paths

from lightning_fed.cli import COMMANDS, OF_TRAINER
from lightning_fed.cli.exits import debugging, exit_with

__all__ = [
    "class_arguments", "classes_for", "command_options", "did_you_mean", "find_class", "listing", "load_shared",
    "shared_path", "unknown_command",
]  # fmt: skip

_MOST_NAMES = 12

_GROUPS = tuple(
    f"lightning_fed.{kind}" for kind in ("aggregators", "masks", "client_algorithms", "callbacks", "models", "data")
)


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


def _shared(name: str | None = None) -> dict[str, EntryPoint]:
    """Returns the entry points, those of a name or all, by import path; none that ``--safe_imports`` does not allow."""
    found = {one.value.replace(":", "."): one for one in _installed() if name in (None, one.name)}
    return {path: one for path, one in found.items() if _is_allowed(path)}


@cache
def _installed() -> list[EntryPoint]:
    return [one for group in _GROUPS for one in entry_points(group=group)]


def _is_allowed(path: str) -> bool:
    with suppress(ImportDenied):
        check_import_path(path)
        return True
    return False


def _failure(one: EntryPoint) -> str | None:
    """Loads an entry point; returns what is wrong with it in one sentence, None if nothing is."""
    try:
        one.load()
    except Exception as error:  # a package of somebody else's may raise anything
        if debugging():
            raise
        package = one.dist.name if one.dist else "a package"
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return f"Expected `{one.name}`, which {package} shares, to be loaded from {one.value}, but: {reason}."
    return None


def shared_path(name: str) -> str | None:
    """Returns the import path of the class that a package shares under a short name; None if none does.

    It ends the program with one sentence if that class cannot be loaded, or if several have the name.
    """
    found = _shared(name)
    if len(found) > 1:
        exit_with(
            f"Expected one class named {name}, but packages share {listing(sorted(found))}: give its import path.", 2
        )
    for path, one in found.items():
        if said := _failure(one):
            exit_with(said, 2)
        return path
    return None


def load_shared() -> None:
    """Loads all shared classes, to list them; says of each that fails why, and goes on."""
    for one in _shared().values():
        if said := _failure(one):
            from lightning.pytorch.utilities import rank_zero_warn  # here, as a typing error needs no Lightning

            rank_zero_warn(said)
