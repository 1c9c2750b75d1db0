"""The command ``lightning-fed completion``: prints a script by which a shell completes commands and their options."""

import argparse
from argparse import ArgumentParser
from dataclasses import fields
from importlib import import_module
from typing import Any, NoReturn

from lightning_fed.cli.federated_cli import FederatedCLI
from lightning_fed.cli.suggestions import command_options
from lightning_fed.errors import FederatedError

__all__ = ["main"]

# The modules that make the parsers of commands without a trainer.
_PLAIN = {
    "report": ("lightning_fed.lab.report_command",),
    "study": ("lightning_fed.lab.runner.command",),
    "dashboard": ("lightning_fed.lab.dashboard_command",),
    "configs": ("lightning_fed.cli.configs_command",),
    "completion": (__name__,),
}
_EVERYWHERE = ("debug", "safe_imports", "help")
_FILES = ("config", "study", "ckpt_path")


class _Found(Exception):
    """Carries the parsers of the commands that take a trainer, by name."""


class _ParsersAlone(FederatedCLI):
    """Makes these parsers, and parses nothing."""

    def parse_arguments(self, parser: Any, args: Any) -> NoReturn:
        """Raises the parsers as soon as they are made."""
        raise _Found(parser._subcommands_action._name_parser_map)


def _options() -> dict[str, list[str]]:
    """Returns the names of each command's options."""
    commands: dict[str, Any] = {}
    try:
        _ParsersAlone([])
    except _Found as found_parsers:
        (commands,) = found_parsers.args
    parsers = {name: [parser] for name, parser in commands.items()}
    parsers |= {name: [import_module(module)._parser() for module in modules] for name, modules in _PLAIN.items()}
    found = {name: [option for each in ours for option in command_options(each)] for name, ours in parsers.items()}
    attack = import_module("lightning_fed.lab.attack.options").AttackOptions
    found["data"] = [*found["fit"], "output"]
    found["attack"] = [*found["data"], *(field.name for field in fields(attack))]
    return {name: [*options, *_EVERYWHERE] for name, options in found.items()}


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="lightning-fed completion",
        description="Prints a script for your shell, which then completes commands and their options.",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    return parser


def main(argv: list[str]) -> int:
    """Prints the script for a shell, which reads it at its start; returns 0."""
    shell = _parser().parse_args(argv).shell
    try:
        import shtab
    except ImportError:
        raise FederatedError("Expected shtab, which is not installed: run `pip install shtab`.") from None
    whole = ArgumentParser(prog="lightning-fed", add_help=False)
    commands = whole.add_subparsers()
    for name, options in _options().items():
        command = commands.add_parser(name, help=name, add_help=False, argument_default=argparse.SUPPRESS)
        for option in dict.fromkeys(options):
            argument = command.add_argument(f"--{option}")
            if option in _FILES:
                argument.complete = shtab.FILE  # type: ignore[attr-defined]  # which shtab reads
    print(shtab.complete(whole, shell))
    return 0
