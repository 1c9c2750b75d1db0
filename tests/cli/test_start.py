"""What a command leaves out so that it starts sooner."""

from typing import Any

import pytest
from jsonargparse import ArgumentParser

from lightning_fed.cli import FederatedCLI
from tests.end_to_end.command import QUICKSTART


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


@pytest.mark.parametrize("more", [[], ["--aggregator.mask=SignAgreement", "--client=SCAFFOLD", "--optimizer=Adam"]])
def test_a_configuration_is_written_as_if_it_were_checked_again(more: list[str]) -> None:
    cli = parsed("fit", f"--config={QUICKSTART}", *more)
    written = cli.parser.dump(cli.config, skip_unset=False)
    assert written == ArgumentParser.dump(cli.parser, cli.config, skip_unset=False)
    assert "SGD" in written
