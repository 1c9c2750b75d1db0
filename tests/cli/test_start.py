"""What a command leaves out so that it starts sooner."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser

import lightning_fed
from lightning_fed.cli import FederatedCLI, main
from lightning_fed.cli.federated_cli import parser_of
from tests.end_to_end.command import QUICKSTART

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("word", ["--help", "-h", "--version", "fti", "completion --help", "completion csh"])
def test_what_needs_no_option_of_a_class_is_answered_without_torch(word: str) -> None:
    code = (
        "import sys\nfrom lightning_fed.cli import main\n"
        f"try: main({word.split()})\n"
        "finally: print(*({'torch', 'lightning'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == ""
    if word == "fti":
        assert done.returncode == 2
        assert done.stderr.endswith("got 'fti'; did you mean `fit`?\n")
    elif word == "completion csh":
        assert done.returncode == 2
        assert "invalid choice: 'csh'" in done.stderr
    else:
        assert done.returncode == 0
        assert done.stdout.startswith(("usage: lightning-fed", f"lightning-fed {lightning_fed.__version__}"))


def test_the_help_is_that_of_the_whole_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert capsys.readouterr().out == parser_of(FederatedCLI).format_help()


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
