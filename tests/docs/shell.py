"""Runs the command lines of the documentation in this process, in a folder of its own, and short."""

import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_fed.cli import main
from lightning_fed.lab.runner.file import load_study
from tests.docs.pages import REPOSITORY, Block

SHORT = ["--trainer.max_rounds", "2"]
_COMMANDS_WITH_TRAINER = ("fit", "validate", "test", "predict")
_NEEDS_FILES = re.compile(r"(?<!e)mnist", re.IGNORECASE)
_NEEDS_EMNIST = re.compile(r"emnist", re.IGNORECASE)


def command_lines(text: str) -> Iterator[list[str]]:
    """Yields the words of each command; lines that end in a backslash go on."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


class Shell:
    """Understands the few commands that the documentation uses, and fails on any other.

    Args:
        monkeypatch: Sets variables until the end of the test.
        has_data: Whether the folder of real data sets is there; commands that need it are only parsed otherwise.
        emnist_folder: The folder that holds emnist47.npz, None if there is none; the same holds for its commands.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, has_data: bool, emnist_folder: Path | None) -> None:
        self.monkeypatch = monkeypatch
        self.has_data = has_data
        self.emnist_folder = emnist_folder

    def run(self, block: Block) -> None:
        """Runs every line of a block."""
        for words in command_lines(block.text):
            self.run_line(words, block.place)

    def run_line(self, words: list[str], place: str) -> None:
        """Runs one command."""
        with self.monkeypatch.context() as variables:
            while re.fullmatch(r"[A-Z_]+=.*", words[0]):
                variables.setenv(*words.pop(0).split("=", 1))
            if self.emnist_folder is not None and _NEEDS_EMNIST.search(" ".join(words)):
                variables.setenv("LIGHTNING_FED_DATA", str(self.emnist_folder))
            runner = self._runner(words)
            if runner is None:
                raise AssertionError(f"{place}: no rule for {shlex.join(words)!r}; mark the block if it cannot be run")
            code = _exit_code(runner)
        assert code in (None, 0), f"{place}: {shlex.join(words)!r} ended with {code}"
        printed_only = "--print_config" in words or self._lacks_data(words)
        if "fit" in words[:4] and not printed_only:
            assert self._has_run(), f"{place}: {shlex.join(words)!r} has left no run"

    def _runner(self, words: list[str]) -> Callable[[], object] | None:
        if "--trainer.devices" in words:  # the other processes run the words that this one was started with
            return lambda: _in_processes(self._short(words[1:]))
        if words[0] == "lightning-fed" or words[:2] == ["python", "cli.py"]:
            rest = words[1:] if words[0] == "lightning-fed" else words[2:]
            if rest[0] == "study" or rest[:2] == [
                "report",
                "--study",
            ]:  # what they do is shown by the tests of the commands
                file = rest[1 if rest[0] == "study" else 2]
                return lambda: load_study(file, dict(zip(rest, rest[1:], strict=False)).get("--profile", "full"))
            return lambda: main(self._short(rest))
        if words[:3] == ["python", "-m", "lightning_fed"]:
            return lambda: main(self._short(words[3:]))
        if words[0] == "python" and len(words) == 2 and Path(words[1]).is_file():
            return lambda: runpy.run_path(words[1], run_name="__main__")
        if words[0] == "make":
            return lambda: _expect_targets(words[1:])
        if words[:2] == ["pip", "install"]:
            return lambda: _expect_installable(words[2:])
        return None

    def _lacks_data(self, words: list[str]) -> bool:
        text = " ".join(words)
        lacks_emnist = self.emnist_folder is None and _NEEDS_EMNIST.search(text) is not None
        return lacks_emnist or (not self.has_data and _NEEDS_FILES.search(text) is not None)

    @staticmethod
    def _has_run() -> bool:
        """Whether the newest run has got to its last round."""
        tables = sorted(Path("runs").rglob("metrics.csv"), key=lambda path: path.stat().st_mtime_ns)
        return bool(tables) and tables[-1].read_text().splitlines()[-1].startswith(f"{SHORT[1]},")

    def _short(self, words: list[str]) -> list[str]:
        if words[:1] and words[0] in _COMMANDS_WITH_TRAINER:
            if self._lacks_data(words):
                return [*words, "--print_config"]
            return words if "--print_config" in words else [*words, *SHORT]
        return [*words, "--print_config"] if words[:1] == ["data"] and self._lacks_data(words) else words


def _in_processes(words: list[str]) -> None:
    raise SystemExit(subprocess.run([sys.executable, "-m", "lightning_fed", *words]).returncode)


def _exit_code(runner: Callable[[], object]) -> object:
    try:
        runner()
    except SystemExit as end:
        return end.code
    return None


def _expect_targets(words: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    for word in words:
        assert "=" in word or word in targets, f"the Makefile has no target {word}"


def _expect_installable(words: list[str]) -> None:
    project = (REPOSITORY / "pyproject.toml").read_text()
    match = re.fullmatch(r"-e \.(?:\[(\w+)\])?", " ".join(words))
    assert match is not None, f"expected an editable install of this folder, got pip install {words}"
    assert match[1] is None or re.search(rf"^{match[1]} = \[", project, re.MULTILINE), f"there is no extra {match[1]}"
