"""A run that is killed at any moment and started again ends in the same bits as one that never was."""

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.end_to_end.command import assert_same_run, fit_words, rows, run_folders, start, start_dying

pytestmark = pytest.mark.slow

ROUNDS = 40
MASK = ("--aggregator.mask=SignAgreement",)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("uninterrupted")
    process = start(fit_words(root, ROUNDS, *MASK))
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    (folder,) = run_folders(root)
    assert [int(row["round"]) for row in rows(folder)] == list(range(ROUNDS + 1))
    return folder


def _finish(root: Path) -> str:
    process = start(fit_words(root, ROUNDS, *MASK, "--ckpt_path=last"))
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return error


def _wait_for_rows(folder_of: Path, count: int, process: "subprocess.Popen[str]") -> None:
    """Waits until the newest run has ``count`` rows or has ended."""
    while process.poll() is None:
        folders = run_folders(folder_of)
        table = folders[-1] / "metrics.csv" if folders else None
        if table is not None and table.exists() and table.read_bytes().count(b"\n") > count:
            return
        time.sleep(0.002)


@pytest.mark.slow
def test_killed_at_random_moments(uninterrupted: Path, tmp_path: Path) -> None:
    chance = random.Random(time.time_ns())  # a new moment each time the test runs
    for reached in (chance.randrange(1, 8), chance.randrange(8, 20), chance.randrange(20, 35)):
        process = start(fit_words(tmp_path, ROUNDS, *MASK, "--ckpt_path=last"))
        _wait_for_rows(tmp_path, reached, process)
        time.sleep(chance.random() * 0.05)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    _finish(tmp_path)
    (folder,) = run_folders(tmp_path)
    assert_same_run(uninterrupted, folder)


@pytest.mark.slow
def test_killed_before_the_first_checkpoint_starts_fresh_and_says_so(uninterrupted: Path, tmp_path: Path) -> None:
    process = start(fit_words(tmp_path, ROUNDS, *MASK, "--ckpt_path=last"))
    while not run_folders(tmp_path) and process.poll() is None:
        time.sleep(0.001)
    process.kill()
    process.communicate()
    (killed,) = run_folders(tmp_path)
    assert not (killed / "checkpoints" / "last.ckpt").exists()
    error = _finish(tmp_path)
    assert "starting a new run" in error
    assert_same_run(uninterrupted, run_folders(tmp_path)[-1])


@pytest.mark.parametrize("place", ["half", "before the move"])
@pytest.mark.slow
def test_killed_inside_a_save(uninterrupted: Path, tmp_path: Path, place: str) -> None:
    for count in (6, 19):
        died = start_dying(count, place, fit_words(tmp_path, ROUNDS, *MASK, "--ckpt_path=last"))
        assert died.returncode == -signal.SIGKILL, died.stderr
    assert list(run_folders(tmp_path)[-1].glob("**/.*.tmp")), "the process died outside a save"
    _finish(tmp_path)
    assert_same_run(uninterrupted, run_folders(tmp_path)[-1])


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_finishes_the_round_saves_and_says_how_to_resume(
    uninterrupted: Path, tmp_path: Path, number: signal.Signals
) -> None:
    process = start(fit_words(tmp_path, ROUNDS, *MASK))
    _wait_for_rows(tmp_path, 3, process)
    process.send_signal(number)
    _, error = process.communicate(timeout=300)
    (folder,) = run_folders(tmp_path)
    assert process.returncode == 128 + number, error
    reached = len(rows(folder)) - 1
    assert reached < ROUNDS
    last_line = error.strip().splitlines()[-1]
    assert f"after round {reached}" in last_line
    command = last_line.split("resume with: lightning-fed ")[1].split()
    resumed = start(command)
    _, error = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, error
    assert_same_run(uninterrupted, folder)
