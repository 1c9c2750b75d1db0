"""The entry point: commands without a trainer are dispatched before LightningCLI is loaded."""

import os
import re
import sys
import warnings

from lightning_fed.cli.exits import debug_mode, mistakes_in_one_sentence

__all__ = ["main"]


def main(args: list[str] | None = None) -> None:
    """Runs one command.

    Args:
        args: Words of the command line, None for those of the process. ``--debug`` anywhere, or the variable
            ``LIGHTNING_FED_DEBUG=1``, shows tracebacks of mistakes.

    Raises:
        SystemExit: With 2 after a mistake on the command line or in a config file, 1 after one found later, 130 after
            Ctrl-C, 128 + the signal's number after a training that a signal ended.
    """
    words = list(sys.argv[1:] if args is None else args)
    with debug_mode("--debug" in words), mistakes_in_one_sentence():
        _run([word for word in words if word != "--debug"])


def _run(words: list[str]) -> None:
    if words[:1] == ["report"]:
        from lightning_fed.cli.report_command import main as report

        raise SystemExit(report(words[1:]))
    if words[:1] == ["configs"]:
        from lightning_fed.cli.configs_command import main as configs

        raise SystemExit(configs(words[1:]))
    _hide_parser_deprecations()
    _make_working_folder_importable()
    if words[:1] == ["data"]:
        from lightning_fed.cli.data_command import main as data

        raise SystemExit(data(words[1:]))
    from lightning_fed.cli.federated_cli import FederatedCLI

    FederatedCLI(words)


def _hide_parser_deprecations() -> None:
    """Hides what jsonargparse says about its use by Lightning, which a user of ours cannot change."""
    for start in ("By default only one", "``ArgumentParser.add_instantiator", "``instantiate_classes", "skip_none"):
        warnings.filterwarnings("ignore", rf"\s*{re.escape(start)}", DeprecationWarning)


def _make_working_folder_importable() -> None:
    """Lets ``class_path: my_file.MyClass`` find my_file.py here; last, so that it shadows nothing installed."""
    here = os.getcwd()
    if "" not in sys.path and here not in sys.path:
        sys.path.append(here)
