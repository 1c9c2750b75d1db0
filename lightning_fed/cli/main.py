"""The entry point: commands without a trainer are dispatched before LightningCLI is loaded."""

import os
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pydoc import ErrorDuringImport, locate
from typing import Any

from lightning_fed.cli.exits import debug_mode, exit_with, mistakes_in_one_sentence, open_streams, output_is_written
from lightning_fed.errors import FederatedError, expect_variables

__all__ = ["main"]

_SAFE_IMPORTS = "--safe_imports"
# Where commands are, by name: loaded when they are asked for, so that training loads nothing of the lab.
_WITHOUT_TRAINER = {
    "report": "lightning_fed.lab.report_command",
    "dashboard": "lightning_fed.lab.dashboard_command",
    "configs": "lightning_fed.cli.configs_command",
}
_WITH_TRAINER = {"data": "lightning_fed.cli.data_command", "attack": "lightning_fed.lab.attack.command"}
# Rooms whose public classes any configuration may name.
_OURS = (
    "aggregators",
    "callbacks",
    "callbacks.diagnostics",
    "client_algorithms",
    "data",
    "masks",
    "models",
    "sampling",
)


def main(args: list[str] | None = None) -> None:
    """Runs one command.

    Args:
        args: Words of the command line, None for those of the process. ``--debug`` anywhere, or the variable
            ``LIGHTNING_FED_DEBUG=1``, shows tracebacks of mistakes; ``--safe_imports NAMES`` anywhere lets options
            name these classes and functions and this package's own alone, in this process from then on.

    Raises:
        SystemExit: With 2 after a mistake on the command line or in a config file, 1 after one found later, 130 after
            Ctrl-C, 128 + the signal's number after a training that a signal ended.
    """
    words = list(sys.argv[1:] if args is None else args)
    open_streams()
    with debug_mode("--debug" in words), output_is_written(), mistakes_in_one_sentence():
        _expect_text(words)
        words, names = _without_safe_imports([word for word in words if word != "--debug"])
        guard = partial(_restrict_imports, names)
        guard()
        _run(words, guard)


def _run(words: list[str], guard: Callable[[], None]) -> None:
    command = words[0] if words else ""
    if command in _WITHOUT_TRAINER:
        raise SystemExit(_load(_WITHOUT_TRAINER[command])(words[1:]))
    # Lightning reads them when it is imported.
    expect_variables("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
    _hide_parser_deprecations()
    _make_working_folder_importable()
    if command in _WITH_TRAINER:
        raise SystemExit(_load(_WITH_TRAINER[command])(words[1:]))
    if command == "study":
        raise SystemExit(_load("lightning_fed.lab.runner.command")(words[1:], guard))
    _load("lightning_fed.cli.federated_cli", "FederatedCLI")(words)


def _load(module: str, name: str = "main") -> Any:
    return getattr(import_module(module), name)


def _expect_text(words: list[str]) -> None:
    """Refuses bytes that are no UTF-8: Python keeps them in words and variables, but no config file can hold them."""
    given = [("the command line", word) for word in words]
    given += [(f"the variable {name}", value) for name, value in os.environ.items() if name.startswith("PL_")]
    for place, text in given:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise FederatedError(f"Expected text in UTF-8, got {ascii(text)[:80]} in {place}.") from None


def _without_safe_imports(words: list[str]) -> tuple[list[str], list[str] | None]:
    """Returns the words without the option, and the names that it was given, None if it is not there."""
    kept, names, rest = [], None, iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if option == _SAFE_IMPORTS:
            names = (value if equals else next(rest, "")).split(",")
        else:
            kept.append(word)
    return kept, names


def _restrict_imports(names: list[str] | None) -> None:
    """Lets options of this process name nothing but these classes and functions and our own, refused before its import.

    Nothing is built where an option takes any value, as no class is expected there.
    """
    if names is None:
        return
    from jsonargparse import set_parsing_settings

    _make_working_folder_importable()
    allowed = {**_own_classes(), **{name: _named(name) for name in names}}
    allowed.update({f"{found.__module__}.{found.__qualname__}": found for found in list(allowed.values())})
    # What is below an allowed class are methods, which would run, such as one that loads a file.
    classes = [(path, found) for path, found in allowed.items() if isinstance(found, type)]
    methods = [f"{path}.{name}" for path, found in classes for name in {*dir(found), *dir(type)}]
    set_parsing_settings(
        import_path_denylist=["*", *methods],
        import_path_allowlist=list(allowed),
        instantiate_subclass_spec_in_any=False,
    )


def _own_classes() -> dict[str, Any]:
    """Returns the classes that options may name anyway, by import path: our public ones and torch's optimizers."""
    from torch import optim

    rooms = [import_module(f"lightning_fed.{room}") for room in _OURS]
    found = {f"{room.__name__}.{name}": getattr(room, name) for room in rooms for name in room.__all__}
    classes = {path: part for path, part in found.items() if isinstance(part, type)}
    optimizers = [kind for kind in vars(optim).values() if isinstance(kind, type) and issubclass(kind, optim.Optimizer)]
    return {**classes, **{f"torch.optim.{kind.__name__}": kind for kind in optimizers}}


def _named(path: str) -> Any:
    """Imports a class or function that the user trusts."""
    found = None
    with suppress(ErrorDuringImport):
        found = locate(path)
    if not (callable(found) and hasattr(found, "__qualname__")):
        what = "nothing that can be imported" if found is None else "none"
        exit_with(
            f"Expected whole names of classes and functions after `{_SAFE_IMPORTS}`, as in "
            f"`torch.optim.SGD,my_file.MyModel`, got {path!r}, which is {what}.",
            2,
        )
    return found


def _hide_parser_deprecations() -> None:
    """Hides what jsonargparse says about its use by Lightning, which a user of ours cannot change."""
    for start in ("By default only one", "``ArgumentParser.add_instantiator", "``instantiate_classes", "skip_none"):
        warnings.filterwarnings("ignore", rf"\s*{re.escape(start)}", DeprecationWarning)


def _make_working_folder_importable() -> None:
    """Lets ``class_path: my_file.MyClass`` find my_file.py here; last, so that it shadows nothing installed."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise FederatedError("Expected a working folder, but this one is gone: change to another.") from None
    if "" not in sys.path and here not in sys.path:
        sys.path.append(here)
