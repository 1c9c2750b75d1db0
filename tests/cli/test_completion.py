"""What a shell is given to complete commands and their options."""

import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest

from lightning_fed.cli import COMMANDS, OF_TRAINER
from lightning_fed.cli.class_names import command_options
from lightning_fed.cli.completion_command import main, options_of_commands
from lightning_fed.cli.data_command import _DataCLI
from lightning_fed.errors import FederatedError
from lightning_fed.lab.attack.command import _AttackCLI

TYPED = {
    "lightning-fed stu": "study",
    "lightning-fed fit --trainer.max_r": "--trainer.max_rounds",
    "lightning-fed data --outp": "--output",
    "lightning-fed report --stu": "--study",
    "lightning-fed report --budg": "--budget",
    "lightning-fed study --sha": "--shard",
    "lightning-fed configs --co": "--copy",
    "lightning-fed dashboard --ent": "--entity",
    "lightning-fed attack --shad": "--shadows",
    "lightning-fed attack --trainer.max_r": "--trainer.max_rounds",
    "lightning-fed completion --he": "--help",
    "lightning-fed fit --safe": "--safe_imports",
}


def test_bash_completes_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="shtab writes the scripts")
    assert main(["bash"]) == 0
    script = capsys.readouterr().out
    for typed, completed in TYPED.items():
        words = typed.split(" ")
        asks = f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _shtab_lightning_fed; echo ${{COMPREPLY[@]}}"
        ran = subprocess.run(["bash", "-c", f"{script}\n{asks}"], capture_output=True, text=True, check=True)
        assert completed in ran.stdout.split(), typed


def test_every_command_has_all_options_of_its_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    found = options_of_commands()
    assert found.keys() == {*OF_TRAINER, *COMMANDS}
    for name, command in (("data", _DataCLI), ("attack", _AttackCLI)):
        parsers: list[Any] = []
        monkeypatch.setattr(command, "parse_arguments", lambda cli, parser, args, to=parsers: to.append(parser))
        with suppress(AttributeError):  # nothing was parsed
            command([])
        assert set(found[name]) == {*command_options(parsers[0]), "debug", "safe_imports"}


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(FederatedError, match="Expected shtab, which is not installed: run `pip install shtab`"):
        main(["zsh"])
