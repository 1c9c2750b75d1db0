"""Processes whose processors round otherwise go on with the same numbers."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.run_unlike import CASES
from tests.distributed.test_two_processes import same

SCRIPT = Path(__file__).with_name("run_unlike.py")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("unlike")
    words = [sys.executable, str(SCRIPT), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_both_end_with_the_same_numbers(found: list[dict[str, Any]], name: str) -> None:
    first, second = (each[name] for each in found)
    assert first["rounds"] == 3
    assert same(first, second)


def test_a_resumed_run_ends_with_them_too(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert all(same(each["resumed"][what], each["FedYogi"][what]) for what in ("weights", "states", "buffers"))


def test_the_processors_do_round_otherwise(found: list[dict[str, Any]]) -> None:
    """A comparison that everything passes would show nothing: weights are sent not only as the run begins."""
    if found[0]["instructions"] == found[1]["instructions"]:
        pytest.skip("this processor has no vector instructions to leave out")
    assert found[0]["FedYogi"]["sent"] > 1
