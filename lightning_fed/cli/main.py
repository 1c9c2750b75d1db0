"""Runs the program: what is easy to answer starts without Lightning, and each command loads only its own module."""

import argparse
import os
import sys
import warnings
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from typing import Any

from lightning_fed import cli
from lightning_fed.cli.exits import exit_with, mistakes_in_one_sentence, open_streams, output_is_written
from lightning_fed.errors import FederatedError, expect_variables

__all__ = ["ABOUT", "main"]

_SAFE = "LIGHTNING_FED_SAFE_IMPORTS"  # which the other processes of a run read
_DESCRIPTION = "Federated learning on PyTorch Lightning. Give options in YAML files, variables or on the command line."
_EPILOG = (
    "Eight further commands, each with --help: `data` takes the options of fit and shows the split, `study FILE` runs "
    "the product of some axes over seeds, `report RUNS` makes tables and plots over finished runs, `dashboard RUNS` "
    "arranges them at Weights & Biases, `attack --ckpt_path RUN` tells training from test samples by a model's "
    "outputs, `privacy` plans ε, `flower` trains over other machines, `configs` lists what comes with the package. "
    "Add --debug to any command for the traceback of a mistake, and --safe_imports NAMES, as in "
    "`torch.optim.SGD,my_file.MyModel`, to one with a configuration of somebody else's: options name these classes and "
    "functions and those of lightning_fed alone."
)
# How jsonargparse makes the parser of the whole program.
ABOUT: dict[str, Any] = {"prog": "lightning-fed", "description": _DESCRIPTION, "epilog": _EPILOG, "default_env": True}


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
        _run_command(words, guard)


def _run_command(words: list[str], guard: Callable[[], None]) -> None:
    name = words[0] if words else ""
    if name in ("-h", "--help", "--version"):
        print(f"lightning-fed {cli.version}\n" if name == "--version" else _help(), end="")
        raise SystemExit(0)
    if name in cli.COMMANDS:
        command = cli.COMMANDS[name]
        if command.needs_lightning:
            _prepare_for_lightning()
        more = [guard] if name == "study" else []
        raise SystemExit(command.load().main(words[1:], *more))
    if name and not name.startswith("-") and name not in cli.OF_TRAINER:
        from lightning_fed.cli.class_names import unknown_command

        exit_with(unknown_command(name), 2)
    _prepare_for_lightning()
    cli.FederatedCLI(words)


def _help() -> str:
    """Returns the help of the whole program, which needs no option of any class, before Lightning is loaded."""
    from jsonargparse import ArgumentParser
    from jsonargparse._actions import ActionConfigFile

    parser = ArgumentParser(**ABOUT, env_prefix="PL")
    help_on_config = "Path to a configuration file in json or yaml format."
    parser.add_argument("-c", "--config", action=ActionConfigFile, help=help_on_config)
    commands = parser.add_subcommands()
    for name, what in cli.OF_TRAINER.items():
        commands.add_subcommand(name, ArgumentParser(), help=what)
    return str(parser.format_help())


def _prepare_for_lightning() -> None:
    """Does what has to be done before Lightning is imported."""
    from jsonargparse._deprecated import JsonargparseDeprecationWarning

    # Lightning causes this warning, and you cannot change that.
    warnings.simplefilter("ignore", JsonargparseDeprecationWarning)
    # Lightning reads these variables when it is imported.
    expect_variables("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
    _make_working_folder_importable()


def _restrict_imports(names: str | None) -> None:
    """Lets options of this process, and of those that it starts, name only some classes; None allows all."""
    if names is not None:
        os.environ[_SAFE] = names
        _make_working_folder_importable()
        from lightning_fed.cli.safe_imports import allow_only

        allow_only(names)


def _make_working_folder_importable() -> None:
    """Lets ``class_path: my_file.MyClass`` find my_file.py here. The folder comes last, so installed packages win."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise FederatedError("Expected a working folder, but this one was deleted: change to another.") from None
    if "" not in sys.path and here not in sys.path:
        sys.path.append(here)
