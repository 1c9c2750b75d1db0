"""Runs the command line in this process up to the trainer's methods, which are recorded instead of run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

import tests.cli.parts  # noqa: F401 - short names resolve for classes that are loaded
from lightning_fed.cli import main
from lightning_fed.trainer import FederatedTrainer

BASE = ["--model", "Plain", "--data", "Digits", "--trainer.logger", "false"]


@dataclass
class Call:
    """What the CLI called a method of the trainer with."""

    command: str
    trainer: FederatedTrainer
    arguments: dict[str, Any]


@dataclass
class CommandLine:
    """Runs commands and keeps what the trainer was asked to do."""

    folder: Path
    calls: list[Call] = field(default_factory=list)
    interrupted: int | None = None

    def run(self, *words: str, command: str = "fit") -> Call:
        """Runs a command on a small module and digits, unless words say otherwise."""
        main([command, *BASE, *words])
        return self.calls[-1]

    def config(self, *words: str, base: bool = True, before: Sequence[str] = ()) -> dict[str, Any]:
        """Returns the resolved config that ``fit`` was run with, after the words ``before`` it."""
        main([*before, "fit", *(BASE if base else []), *words])
        return self.calls[-1].trainer.run_config

    def file(self, name: str, text: str) -> str:
        """Writes a configuration file and returns its path."""
        path = self.folder / name
        path.write_text(text)
        return str(path)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CommandLine:
    line = CommandLine(tmp_path)

    def recorded(name: str) -> Callable[..., None]:
        @wraps(getattr(FederatedTrainer, name))
        def method(self: FederatedTrainer, **arguments: Any) -> None:
            line.calls.append(Call(name, self, arguments))
            if line.interrupted is not None:
                self.books.interrupted, self.books.stop_message = (
                    line.interrupted,
                    "Saved; resume with `--ckpt_path last`.",
                )

        return method

    for name in ("fit", "validate", "test", "predict"):
        monkeypatch.setattr(FederatedTrainer, name, recorded(name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_FED_DEBUG", "0")  # which `--debug` sets for the rest of the process
    return line


@pytest.fixture
def mistake(cli: CommandLine, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs words that are wrong and returns the one sentence, after checking how the program ended."""

    def run(*words: str, code: int = 2) -> str:
        with pytest.raises(SystemExit) as exit_info:
            main(list(words))
        assert exit_info.value.code == code
        lines = [line for line in capsys.readouterr().err.splitlines() if line and not line.startswith("Seed set")]
        assert len(lines) == 1, lines
        assert not cli.calls
        return lines[0]

    return run
