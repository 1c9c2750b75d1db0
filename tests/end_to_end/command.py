"""Starts the command line in a process of its own, and reads what a run left behind."""

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_fed import FederatedTrainer

REPOSITORY = Path(__file__).resolve().parents[2]
QUICKSTART = REPOSITORY / "configs" / "quickstart.yaml"

# Kills its own process in the middle of the n-th atomic write: after the temporary file is written and before it is
# moved, or after half of it is written.
DYING = """
import os, signal, sys
count, place = int(sys.argv[1]), sys.argv[2]
import lightning_fed.core.files as run
real_fsync, real_open, seen, temporary = os.fsync, open, 0, set()
def opened(path, *args, **options):
    file = real_open(path, *args, **options)
    if str(path).endswith(".tmp"):
        temporary.add(file.fileno())
    return file
def fsync(fd):
    global seen
    if fd not in temporary:  # a row, which is appended
        return real_fsync(fd)
    temporary.remove(fd)
    seen += 1
    if seen == count:
        if place == "half":
            os.ftruncate(fd, os.fstat(fd).st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    real_fsync(fd)
run.os.fsync, run.open = fsync, opened
from lightning_fed.cli import main
main(sys.argv[3:])
"""


def fit_words(root: Path, rounds: int, *more: str) -> list[str]:
    """Words of a short quickstart run that logs to metrics.csv alone."""
    return [
        "fit", f"--config={QUICKSTART}", f"--trainer.default_root_dir={root}", f"--trainer.max_rounds={rounds}",
        "--trainer.name=run", "--trainer.logger=[]", *more,
    ]  # fmt: skip


def short_trainer(root: Path, rounds: int, clients: int = 3) -> FederatedTrainer:
    """A trainer for short runs from Python that logs to metrics.csv alone."""
    return FederatedTrainer(
        accelerator="cpu", max_rounds=rounds, clients_per_round=clients, default_root_dir=str(root), logger=[],
        name="run", enable_progress_bar=False,
    )  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    """One thread, no coverage of the caller's W&B settings."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def start(words: list[str], **options: Any) -> "subprocess.Popen[str]":
    """Starts the command line."""
    return subprocess.Popen(
        [sys.executable, "-m", "lightning_fed", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        **options,
    )


def start_dying(count: int, place: str, words: list[str]) -> "subprocess.CompletedProcess[str]":
    """Runs the command line in a process that kills itself inside its ``count``-th atomic write."""
    return subprocess.run(
        [sys.executable, "-c", DYING, str(count), place, *words], capture_output=True, text=True, env=environment()
    )


def run_folders(root: Path) -> list[Path]:
    """The run folders below a root, in the order of their version."""
    return sorted(root.glob("run/version_*"), key=lambda path: int(path.name[8:]))


def rows(folder: Path) -> list[dict[str, str]]:
    """The rows of a run without the columns that tell time."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in csv.DictReader(file)]


def final_state(folder: Path) -> dict[str, torch.Tensor]:
    """The model of a run's last checkpoint."""
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    state: dict[str, torch.Tensor] = checkpoint["state_dict"]
    return state


def assert_same_run(one: Path, other: Path) -> None:
    """Asserts bit-equal final models and equal rows."""
    first, second = final_state(one), final_state(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert rows(one) == rows(other)
