"""The program without something of its surroundings: a standard stream, room to print, its folder, a launcher."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_fed.cli import exits, main
from tests.parts import quick_first

ROOT = Path(__file__).parents[2]
FULL = Path("/dev/full")


def shell(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs a line of bash in which ``fed`` is the program."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = f'fed() {{ "{sys.executable}" -m lightning_fed "$@"; }}; set -o pipefail; {command}'
    return subprocess.run(["bash", "-c", line], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    ("command", "status", "says"),
    quick_first(
        3,
        [
            ("fed configs > /dev/full", 1, "Expected to write to the standard output, but that failed (No space left"),
            ("fed configs | true", 141, ""),
            ("fed configs nothing 2>&-", 1, ""),
            ("fed configs quickstart > /dev/full", 1, "Expected to write to the standard output"),
            ("fed fit --config quickstart --print_config > /dev/full", 1, "Expected to write to the standard output"),
            ("fed fit --config quickstart --trainer.fast_dev_run 1 2>&-", 0, ""),
            ("fed fit --config quickstart --trainer.fast_dev_run 1 >&- 2>&-", 0, ""),
            ("fed fit --nothing 1 >&-", 2, "There is no option `--nothing`"),
            ("mkdir gone; cd gone; rmdir ../gone; fed fit --config quickstart", 1, "Expected a working folder, but"),
        ],
    ),
)
def test_surroundings(tmp_path, command, status, says):
    done = shell(command, tmp_path)
    assert done.returncode == status, done.stderr
    assert done.stderr.startswith(says)
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 1 or status == 0


def test_an_error_that_is_not_of_the_output_stays(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with pytest.raises(OSError, match="elsewhere"), exits.output_is_written():
        raise OSError(errno.ENOSPC, "elsewhere")


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"])
def test_a_rank_that_is_none(mistake, monkeypatch, name):
    monkeypatch.setenv(name, "x")
    assert mistake("fit", code=1) == (
        f"Expected the environment variable {name}, which launchers set, to be a whole number, got 'x': unset it, or "
        "let the launcher set it."
    )


def test_a_word_with_bytes_that_are_no_text():
    with pytest.raises(SystemExit, match="1"), exits.mistakes_in_one_sentence():
        "\udcff".encode()


def test_no_control_character_of_a_mistake_reaches_the_terminal(capsys):
    with pytest.raises(SystemExit):
        exits.exit_with("Expected a name,\n got \x1b[2J\x9b1m\udcffred.", 1)
    assert capsys.readouterr().err == "Expected a name, got  [2J 1m red.\n"


def test_names_that_no_file_can_have(capsys):
    with pytest.raises(SystemExit) as ended, exits.mistakes_in_one_sentence():
        Path("a" * 300).stat()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("Expected a valid name of a file or folder, got 'aaa")


@pytest.mark.parametrize("size", quick_first(1, [10**14, 10**18, 10**30]))
def test_a_width_that_no_memory_holds(mistake, size):
    words = ["--model", "Plain", "--data", "Digits", "--model.width", str(size)]
    sentence = mistake("fit", *words, code=1)
    assert sentence.startswith("Expected sizes of Plain that fit into memory, but: ")


def test_null_where_a_constructor_takes_none(mistake):
    sentence = mistake("fit", "--model", "Plain", "--data", "Digits", "--model.width", "null", code=1)
    assert sentence.startswith("Expected values for `width` of Plain, got null, but: ")


def test_a_folder_that_is_gone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "getcwd", lambda: os.stat(tmp_path / "gone"))
    with pytest.raises(SystemExit):
        main(["fit"])
    assert capsys.readouterr().err.startswith("Expected a working folder, but this one was deleted")


@pytest.mark.parametrize(("stream", "fails"), quick_first(1, [("stdout", True), ("stdout", False), ("stderr", True)]))
@pytest.mark.slow
def test_a_step_that_takes_a_stream_away(tmp_path, stream, fails):
    (tmp_path / "own.py").write_text(
        "import sys\n"
        "from lightning_fed.models import ImageClassifier\n"
        "class Silent(ImageClassifier):\n"
        "    def training_step(self, batch, batch_idx):\n"
        f"        sys.{stream} = None\n"
        f"        return {'1.5' if fails else 'super().training_step(batch, batch_idx)'}\n"
    )
    done = shell(
        "fed fit --config quickstart --model own.Silent --model.backbone MLP --trainer.fast_dev_run 1", tmp_path
    )
    assert done.returncode == int(fails), done.stderr
    assert "Traceback" not in done.stderr
    assert ("Expected `Silent.training_step` to return" in done.stderr + done.stdout) == fails
