"""The command ``lightning-fed completion``: prints a script by which a shell completes commands and their options."""

from argparse import SUPPRESS, ArgumentParser

from lightning_fed.cli import COMMANDS
from lightning_fed.cli.class_names import command_options
from lightning_fed.errors import FederatedError

__all__ = ["main", "make_parser", "options_of_commands"]

_EVERYWHERE = ("debug", "safe_imports", "help")
_FILES = ("config", "study", "ckpt_path")


def options_of_commands() -> dict[str, list[str]]:
    """Returns the names of each command's options."""
    from lightning_fed.cli.federated_cli import FederatedCLI, parser_of  # not for help or a mistake: it loads torch

    parsers = dict(parser_of(FederatedCLI)._subcommands_action._name_parser_map)
    parsers |= {name: command.load().make_parser() for name, command in COMMANDS.items()}
    return {name: [*command_options(own), *_EVERYWHERE] for name, own in parsers.items()}


def make_parser() -> ArgumentParser:
    """Makes the parser of this command."""
    about = "Prints a script for your shell, which then completes commands and their options."
    parser = ArgumentParser(prog="lightning-fed completion", description=about)
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    return parser


def main(argv: list[str]) -> int:
    """Prints the script for a shell, which reads it at its start; returns 0."""
    shell = make_parser().parse_args(argv).shell
    try:
        import shtab
    except ImportError:
        raise FederatedError("Expected shtab, which is not installed: run `pip install shtab`.") from None
    whole = ArgumentParser(prog="lightning-fed", add_help=False)
    commands = whole.add_subparsers()
    for name, options in options_of_commands().items():
        command = commands.add_parser(name, help=name, add_help=False, argument_default=SUPPRESS)
        for option in dict.fromkeys(options):
            argument = command.add_argument(f"--{option}")
            if option in _FILES:
                argument.complete = shtab.FILE  # type: ignore[attr-defined]  # which shtab reads
    print(shtab.complete(whole, shell))
    return 0
