"""One group of two processes for all cases: starting it takes longer than they do."""

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.process_cases import CASES, kept

SCRIPT = Path(__file__).with_name("run_cases.py")


class Pair:
    """What one process finds, and what each of two finds."""

    def __init__(self, folder: Path, everyone: list[dict[str, Any]]) -> None:
        self.folder, self.everyone = folder, everyone
        self.alone = cache(lambda name: CASES[name](1, folder))


def run_pair(folder: Path, *words: str) -> list[dict[str, Any]]:
    """Runs the cases in two processes; returns what each found."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *words], capture_output=True, text=True, cwd=folder, timeout=3600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / "stderr").write_text(done.stderr)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    kept(1, folder, where="device", rounds=3, at="begun by one")
    return Pair(folder, run_pair(folder))
