"""The entry point. Commands without a trainer start before LightningCLI is loaded, so they start fast."""

import argparse
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pydoc import ErrorDuringImport, locate
from typing import Any

from lightning_fed.cli.exits import exit_with, mistakes_in_one_sentence, open_streams, output_is_written
from lightning_fed.errors import FederatedError, expect_variables

__all__ = ["main"]

# The module of each command, loaded only when you run the command: training loads nothing of the lab.
_WITHOUT_TRAINER = {
    "report": "lightning_fed.lab.report_command",
    "dashboard": "lightning_fed.lab.dashboard_command",
    "configs": "lightning_fed.cli.configs_command",
}
_WITH_TRAINER = {
    "completion": "lightning_fed.cli.completion_command",
    "data": "lightning_fed.cli.data_command",
    "attack": "lightning_fed.lab.attack.command",
    "study": "lightning_fed.lab.runner.command",
}
# Packages whose public classes every configuration may name, also under `--safe_imports`.
_OURS = (
    "aggregators", "callbacks", "callbacks.diagnostics", "client_algorithms", "data", "masks", "models", "sampling"
)  # fmt: skip
_SAFE = "LIGHTNING_FED_SAFE_IMPORTS"  # which the other processes of a run read


def main(args: list[str] | None = None) -> None:
    """Runs one command.

    Args:
        args: Command-line arguments, None for those of the process. ``--debug`` anywhere, or the variable
            ``LIGHTNING_FED_DEBUG=1``, shows tracebacks of mistakes. With ``--safe_imports NAMES`` anywhere, or the
            variable ``LIGHTNING_FED_SAFE_IMPORTS``, options may name only these classes and functions and those of this
            package. Both last until the process ends, and hold for the processes that it starts.

    Raises:
        SystemExit: With 2 after a mistake on the command line or in a config file, 1 after a later mistake, 130 after
            Ctrl-C, 128 + the signal's number if a signal ended the training.
    """
    general = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    general.add_argument("--debug", action="store_true")
    general.add_argument("--safe_imports", nargs="?", const="", default=os.environ.get(_SAFE))
    given, words = general.parse_known_args(args)
    if given.debug:
        os.environ["LIGHTNING_FED_DEBUG"] = "1"
    open_streams()
    with output_is_written(), mistakes_in_one_sentence():
        for word in words:  # a parser would refuse it too, but import what it is to keep out before
            if word.startswith("-") and get_close_matches(word.partition("=")[0].lower(), ["--safe_imports"], 1, 0.7):
                exit_with(f"Expected `--safe_imports NAMES`, written so and before any `--`, got {word!r}.", 2)
        guard = partial(_restrict_imports, given.safe_imports)
        guard()
        _run(words, guard)


def _run(words: list[str], guard: Callable[[], None]) -> None:
    command = words[0] if words else ""
    if command not in _WITHOUT_TRAINER:
        from jsonargparse._deprecated import JsonargparseDeprecationWarning

        # Lightning causes this warning, and you cannot change that.
        warnings.simplefilter("ignore", JsonargparseDeprecationWarning)
        # Lightning reads these variables when it is imported.
        expect_variables("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
        _make_working_folder_importable()
    if module := {**_WITHOUT_TRAINER, **_WITH_TRAINER}.get(command):
        more = [guard] if command == "study" else []
        raise SystemExit(import_module(module).main(words[1:], *more))
    import_module("lightning_fed.cli.federated_cli").FederatedCLI(words)


def _restrict_imports(names: str | None) -> None:
    """Lets options name only these classes and functions and those of this package; others are never imported.

    An option of type ``Any`` builds no class at all, as none is expected there.
    """
    if names is None:
        return
    from jsonargparse import set_parsing_settings

    os.environ[_SAFE] = names
    _make_working_folder_importable()
    allowed = {**_own_classes(), **{name: _named(name) for name in names.split(",")}}
    allowed.update({f"{found.__module__}.{found.__qualname__}": found for found in list(allowed.values())})
    # Names below an allowed class are its methods. They are denied, as one may for example load a file.
    classes = [(path, found) for path, found in allowed.items() if isinstance(found, type)]
    methods = [f"{path}.{name}" for path, found in classes for name in {*dir(found), *dir(type)}]
    try:
        set_parsing_settings(
            import_path_denylist=["*", *methods],
            import_path_allowlist=list(allowed),
            instantiate_subclass_spec_in_any=False,
        )
    except ValueError as error:  # of a function that could take the restriction back
        exit_with(f"Expected after `--safe_imports` names that can be allowed, but: {error}", 2)


def _own_classes() -> dict[str, Any]:
    """Returns the classes that are always allowed, by import path: our public ones and torch's optimizers."""
    from torch import optim

    rooms = [import_module(f"lightning_fed.{room}") for room in _OURS]
    found = {f"{room.__name__}.{name}": getattr(room, name) for room in rooms for name in room.__all__}
    classes = {path: part for path, part in found.items() if isinstance(part, type)}
    optimizers = [kind for kind in vars(optim).values() if isinstance(kind, type) and issubclass(kind, optim.Optimizer)]
    return {**classes, **{f"torch.optim.{kind.__name__}": kind for kind in optimizers}}


def _named(path: str) -> Any:
    """Imports a class or function that you trust."""
    found = None
    if not _is_module(path):
        with suppress(ErrorDuringImport):
            found = locate(path)
    is_below = isinstance(locate(path.rpartition(".")[0]) if found is not None and "." in path else None, type)
    if is_below or not (callable(found) and hasattr(found, "__qualname__")):
        expected = "full names of classes and functions, as in `torch.optim.SGD,my_file.MyModel`"
        exit_with(f"Expected after `--safe_imports` {expected}, got {path!r}, which is none that can be imported.", 2)
    return found


def _is_module(path: str) -> bool:
    """Says whether a name is one of a package or module, or has no dot, without importing anything."""
    names, places = path.split("."), None
    for end in range(1, len(names) + 1 if all(names) else 0):
        specs = (finder.find_spec(".".join(names[:end]), places) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
        places = None if spec is None else spec.submodule_search_locations
        if places is None:
            return end == len(names) and (spec is not None or end == 1)
    return True


def _make_working_folder_importable() -> None:
    """Lets ``class_path: my_file.MyClass`` find my_file.py here. The folder comes last, so installed packages win."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise FederatedError("Expected a working folder, but this one was deleted: change to another.") from None
    if "" not in sys.path and here not in sys.path:
        sys.path.append(here)
