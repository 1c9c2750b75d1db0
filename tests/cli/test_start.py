"""What a command leaves out so that it starts sooner."""

from typing import Any

import pytest
from jsonargparse import ArgumentParser

from lightning_fed.cli import FederatedCLI
from tests.end_to_end.command import QUICKSTART

COMMANDS = {"fit", "validate", "test", "predict"}


class Parsed(Exception):
    pass


class OnlyParses(FederatedCLI):
    """Stops where it would build what was parsed."""

    def instantiate_classes(self) -> None:
        raise Parsed(self)


def parsed(*words: str) -> Any:
    with pytest.raises(Parsed) as stopped:
        OnlyParses(list(words))
    return stopped.value.args[0]


@pytest.mark.parametrize("before", [True, False])
def test_only_the_parser_of_the_command_is_filled(before: bool, tmp_path) -> None:
    """Unless the command is not the first word, where an option before it may name any."""
    config = tmp_path / "config.yaml"
    config.write_text("test:\n  seed_everything: 3\n")
    words = ["test", f"--config={QUICKSTART}"] if before else [f"--config={config}", "test", f"--config={QUICKSTART}"]
    cli = parsed(*words)
    filled = {name for name, parser in cli._subcommand_parsers.items() if len(parser._actions) > 10}
    assert filled == ({"test"} if before else COMMANDS)
    assert cli.config["test"]["seed_everything"] == 0
    assert cli.config["test"]["data"]["class_path"].endswith("Digits")


@pytest.mark.parametrize("more", [[], ["--aggregator.mask=SignAgreement", "--client=SCAFFOLD", "--optimizer=Adam"]])
def test_a_configuration_is_written_as_if_it_were_checked_again(more: list[str]) -> None:
    cli = parsed("fit", f"--config={QUICKSTART}", *more)
    written = cli.parser.dump(cli.config, skip_unset=False)
    assert written == ArgumentParser.dump(cli.parser, cli.config, skip_unset=False)
    assert "SGD" in written
