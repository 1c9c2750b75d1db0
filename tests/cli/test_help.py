"""The help of a command: short, by task, each class where it works and nowhere else."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule, LightningModule

from lightning_fed.aggregators import Aggregator
from lightning_fed.cli import FederatedCLI, main
from lightning_fed.cli.federated_cli import parser_of
from lightning_fed.client_algorithms import ClientAlgorithm
from lightning_fed.trainer import FederatedTrainer
from lightning_fed.trainer.callback_order import BARS, INSTEAD

COMMANDS = ("fit", "validate", "test", "predict", "data", "attack")
PRIVATE = ("GivenLoaders", "AdoptedData", "IdxImages", "StockCallbacks", "RoundCSVLogger", "DummyLogger")


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit, match="0"):
        main(list(words))
    return capsys.readouterr().out


def listed(text: str) -> list[str]:
    """The classes in a short help."""
    return [name for line in re.findall("^ {8}(.*)$", text, re.MULTILINE) for name in re.findall(r"\w+", line)]


SHOW_ALL = """
import contextlib, io, json
from lightning_fed.cli import main
texts = {}
for command in COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main([command, "--help"])
    texts[command] = said.getvalue()
print(json.dumps(texts))
"""


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """The help of each command, in a process without the classes of other tests, which it would list."""
    words = [sys.executable, "-c", SHOW_ALL.replace("COMMANDS", repr(COMMANDS))]
    environment = {**os.environ, "COLUMNS": "80"}
    said = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=300).stdout
    found: dict[str, str] = json.loads(said.splitlines()[-1])
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_it_is_short_and_in_groups_by_task(command: str, texts: dict[str, str]) -> None:
    text = texts[command]
    assert text.count("\n") <= 250
    assert max(map(len, text.splitlines())) <= 80
    titles = re.findall(r"^([A-Z][\w ,]*):$", text, re.MULTILINE)
    assert titles[:4] == ["Model", "Data", "Aggregator", "Client"]
    assert titles[-1] == ("Start and resume" if command == "fit" else "Of this command")
    assert not re.search("<class|SUPPRESS|None|null|ENV|ARG", text)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_class_stands_once_and_where_it_works(command: str, texts: dict[str, str]) -> None:
    text = texts[command]
    counts = Counter(listed(text))
    assert set(counts.values()) == {1}
    expected = {"ImageClassifier", "MNIST", "FedGMA", "SignAgreement", "FedProx", "EarlyStopping", "Stragglers", "SGD",
                "ReduceLROnPlateau", "CSVLogger", "ClientEvaluation", "FederatedCheckpoint"}  # fmt: skip
    assert expected <= counts.keys()
    assert not counts.keys() & {*INSTEAD, *BARS, *PRIVATE, "Payload", "ClientAlgorithm", "LightningModule", "Callback"}
    callbacks = listed(text.partition("--trainer.callbacks")[2].partition("--trainer.default_root_dir")[0])
    classes = {kind.__name__ for base in (Aggregator, ClientAlgorithm) for kind in _below(base)}
    assert not classes & set(callbacks)


def _below(kind: type) -> list[type]:
    return [kind, *(below for child in kind.__subclasses__() for below in _below(child))]


@pytest.mark.parametrize("words", [["--help", "all"], ["--help=all"], ["-h", "all"]])
def test_all_has_every_option_text_variable_and_class(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short, text = shown(capsys, "fit", "--help"), shown(capsys, "fit", *words)
    fit = parser_of(FederatedCLI)._subcommands_action._name_parser_map["fit"]
    options = {action.option_strings[-1].rstrip("+") for action in fit._actions if not action.dest.endswith(".help")}
    assert options == set(re.findall(r"^  .*?(--[\w.]+)(?= [^ ]+$)", text, re.MULTILINE)) - {"--aggregator.mask"}
    assert "[PL_FIT__TRAINER__MAX_ROUNDS]" in text
    assert not re.search("<class|GivenLoaders|BatchSizeFinder", text)
    flat = " ".join(text.split())
    assert "`channels_last` is usually faster" in flat
    assert "channels_last` is usually" not in " ".join(short.split())
    assert set(listed(short)) <= set(re.findall(r"^ {8}(\w+)(?:: |$)", text, re.MULTILINE))
    assert "Krum: Adds the one update" in flat


def test_another_word_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["fit", "--help", "everything"])
    assert capsys.readouterr().err == "Expected `--help` or `--help all`, got `--help everything`.\n"


class Own(FederatedTrainer):
    """A trainer.

    Args:
        warmth: How warm it is, in %.
        **kwargs: Passed on.
    """

    def __init__(self, warmth: int = 3, **kwargs: Any) -> None:
        super().__init__(**kwargs)


class Undocumented(LightningModule):
    def __init__(self, width: int, rates: dict[str, float] | None = None) -> None:
        super().__init__()


class Loaders(LightningDataModule):
    def __init__(self, width: int = 2) -> None:
        super().__init__()


class OwnCLI(FederatedCLI):
    def add_arguments_to_parser(self, parser: Any) -> None:
        super().add_arguments_to_parser(parser)
        parser.link_arguments("data.width", "model.width")
        parser.add_argument("--note", help="What is written above.")

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(
            args, model_class=Undocumented, datamodule_class=Loaders, subclass_mode_data=False, trainer_class=Own,
            **kwargs,
        )  # fmt: skip


def test_a_command_line_of_your_own_shows_what_it_adds() -> None:
    text = parser_of(OwnCLI)._subcommands_action._name_parser_map["fit"].format_help()
    tail = text.partition("More of the trainer:")[2]
    assert "--trainer.warmth int\n      How warm it is, in %. (default: 3)\n" in tail
    assert "Of this command:\n  --note VALUE" in tail
    assert "Model:\n  --model.rates str|float\n  --link_data" in text
    assert "Data:\n  --data.width int\n      (default: 2)\n" in text
    assert "model.width" not in text


def test_the_help_of_a_class_and_of_the_program_stay(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--aggregator.mask" in shown(capsys, "fit", "--aggregator.help", "FedYogi")
    assert "Stopping" in shown(capsys, "fit", "--trainer.callbacks.help", "EarlyStopping")
    assert "configs" in parser_of(FederatedCLI).format_help()
