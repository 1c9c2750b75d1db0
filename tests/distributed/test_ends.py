"""One process dies, is asked to stop, or never comes: the others end too, and say why; and who else may start them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("run_ending.py")
LOST = "Expected every process of the run to go on, but"


def run(how: str, folder: Path, *launcher: str) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, *launcher, str(SCRIPT), how, str(folder)]
    return subprocess.run(words, capture_output=True, text=True, cwd=folder, timeout=300)  # who waits does so for hours


def saved_rounds(folder: Path) -> list[int]:
    return [torch.load(path, weights_only=True)["epoch"] for path in folder.rglob("last.ckpt")]


@pytest.mark.slow
def test_a_killed_process_ends_the_first(tmp_path: Path) -> None:
    ended = run("kill 1", tmp_path)
    assert ended.returncode == 4
    assert f"{LOST} process 1 (pid " in ended.stderr
    assert "killed by SIGKILL) has ended without a message" in ended.stderr
    assert saved_rounds(tmp_path) == [1]


@pytest.mark.slow
def test_a_killed_first_process_ends_the_others(tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPT), "kill 0", str(tmp_path)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as ended:
        assert ended.stderr is not None
        said = ended.stderr.read()  # until the last process that holds it has ended
    assert ended.returncode == -9
    assert f"{LOST} process 0 has ended without a message" in said
    assert saved_rounds(tmp_path) == [1]


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_after_the_round(tmp_path: Path) -> None:
    """To the first process in one run, to the second in the next one, in the same processes."""
    ended = run("stop", tmp_path)
    assert ended.returncode == 0
    assert ended.stderr.count("rounds of first: 2") == ended.stderr.count("rounds of second: 2") == 2
    assert ended.stderr.count("Stopped by SIGTERM after round 2; resume with:") == 2  # once for each run
    assert ended.stderr.count("Stopping after this round") == 1  # which only the first process says
    assert saved_rounds(tmp_path) == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["move_out", "move_in"])
def test_a_failure_as_client_state_moves_ends_all(tmp_path: Path, how: str) -> None:
    """The other process has something to receive too, for which it must not wait."""
    ended = run(f"{how} 1", tmp_path)
    assert ended.returncode == 4
    assert ended.stderr.count(f"Expected a record that can be moved, but {how} fails.") == 2


@pytest.mark.slow
def test_what_cannot_be_told_to_the_others_ends_all(tmp_path: Path) -> None:
    """While another process waits for it."""
    ended = run("foreign 1", tmp_path)
    assert ended.returncode == 4
    assert ended.stderr.count("Process 1 ended with AttributeError: Can't pickle local object") == 1


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_work_for_three_times_the_limit_goes_on_where_silence_ends_the_run(tmp_path: Path, rank: int) -> None:
    """What a time limit on exchanges cannot tell apart: the others wait for both."""
    worked = run(f"works {rank}", tmp_path)
    assert (worked.returncode, worked.stderr.count("rounds of run: 3")) == (0, 2)
    waited = run(f"waits {rank}", tmp_path)
    assert waited.returncode in (1, 4)
    assert f"{LOST} process {rank} has been silent for 0.05 minutes" in waited.stderr


@pytest.mark.slow
def test_a_process_that_never_joins(tmp_path: Path) -> None:
    ended = run("absent 1", tmp_path)
    assert ended.returncode == 1
    assert "exit code 3) to join the run, but it has ended before" in ended.stderr
    assert saved_rounds(tmp_path) == []


@pytest.mark.slow
def test_a_run_after_one_that_failed_ends_as_if_it_were_the_first(tmp_path: Path) -> None:
    """Also where a process stopped waiting for an exchange, which the failed one came to later."""
    ended = run("late 1", tmp_path)
    assert (ended.returncode, ended.stderr.count("rounds of run: 3")) == (0, 2), ended.stderr


@pytest.mark.slow
def test_torchrun_starts_the_processes(tmp_path: Path) -> None:
    ended = run("torchrun", tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("rounds of run: 3") == 2
    assert "Starting with 2 processes" in ended.stderr
    assert saved_rounds(tmp_path) == [3]
